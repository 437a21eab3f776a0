import pytest
import torch
from kernel_cases import PROJECTIONS, Spec, Truth, assert_same_bits, assert_true, build

from scute.kernels import lowrank, reference

IMPLEMENTATIONS = [
    pytest.param(reference.low_rank, torch.float64, id="reference-float64"),
    pytest.param(reference.low_rank, torch.float32, id="reference-float32"),
    pytest.param(reference.low_rank, torch.float16, id="reference-float16"),
    pytest.param(lowrank.low_rank, torch.float32, id="triton-float32"),
    pytest.param(lowrank.low_rank, torch.float16, id="triton-float16"),
]


@pytest.mark.parametrize("spec", PROJECTIONS, ids=str)
@pytest.mark.parametrize(("low_rank", "dtype"), IMPLEMENTATIONS)
def test_equals_the_normal_form_row_by_row(low_rank, dtype: torch.dtype, spec: Spec):
    case = build(spec, dtype)
    y = case.y.clone()
    low_rank(*case.low_rank_args(y))
    truth = case.truth
    assert_true(y, truth, Truth.low_rank)
    touched = truth.touched(truth.factors.keys() | truth.scale.keys() | truth.shift.keys()).to(y.device)
    assert_same_bits(y[~touched], case.y[~touched])


@pytest.mark.parametrize("low_rank", [reference.low_rank, lowrank.low_rank])
def test_is_deterministic(low_rank):
    case = build(PROJECTIONS[8], torch.float16)
    first, second = case.y.clone(), case.y.clone()
    low_rank(*case.low_rank_args(first))
    low_rank(*case.low_rank_args(second))
    assert_same_bits(first, second)


@pytest.mark.parametrize("low_rank", [reference.low_rank, lowrank.low_rank])
def test_accepts_rows_of_a_wider_buffer(low_rank):
    case = build(PROJECTIONS[4], torch.float32)
    rows, out = case.y.shape
    buffer = torch.full((rows, out + 9), float("nan"), device=case.y.device)
    y = buffer[:, 4 : 4 + out]
    y.copy_(case.y)
    case.x = torch.cat([case.x, torch.full_like(case.x, float("nan"))], 1)[:, : case.x.shape[1]]
    low_rank(*case.low_rank_args(y))
    assert_true(y, case.truth, Truth.low_rank)
    assert buffer[:, :4].isnan().all()
    assert buffer[:, 4 + out :].isnan().all()


@pytest.mark.parametrize("low_rank", [reference.low_rank, lowrank.low_rank])
def test_does_nothing_when_not_live(low_rank):
    case = build(PROJECTIONS[4], torch.float32)
    case.plan.live[0] = 0
    y = case.y.clone()
    low_rank(*case.low_rank_args(y))
    assert_same_bits(y, case.y)


def test_float16_keeps_the_mantissa_of_the_shrunk_row():
    """A rank-1 term whose shrunk value needs more than 11 bits: 2049 * 1 - 2048 must be 1, not 0."""
    case = build(PROJECTIONS[2], torch.float16)
    a, b, first = case.layer["a"], case.layer["b"], int(case.layer["row_start"][1])
    case.layer["table"][1, 0] = torch.tensor([2, 0])
    a[0, first : first + 2] = 0
    a[0, first, :2] = torch.tensor([2048, 1])
    a[0, first + 1, 0] = 2048
    b[first] = 1
    b[first + 1] = -1
    case.x.fill_(1)
    y = torch.zeros_like(case.y)
    lowrank.low_rank(*case.low_rank_args(y))
    assert torch.equal(y, torch.ones_like(y))

import pytest
import torch
from kernel_cases import PROJECTIONS, Spec, Truth, assert_same_bits, assert_true, build

from scute.kernels import launch, reference
from scute.kernels.routes import UNIT_BYTES, Field, Flag

IMPLEMENTATIONS = [
    pytest.param(reference.adapt, torch.float64, id="reference-float64"),
    pytest.param(reference.adapt, torch.float32, id="reference-float32"),
    pytest.param(reference.adapt, torch.float16, id="reference-float16"),
    pytest.param(launch.adapt, torch.float32, id="triton-float32"),
    pytest.param(launch.adapt, torch.float16, id="triton-float16"),
]
both = pytest.mark.parametrize("adapt", [reference.adapt, launch.adapt], ids=["reference", "triton"])


@pytest.mark.parametrize("spec", PROJECTIONS, ids=str)
@pytest.mark.parametrize(("adapt", "dtype"), IMPLEMENTATIONS)
def test_equals_the_normal_form_row_by_row(adapt, dtype: torch.dtype, spec: Spec):
    case = build(spec, dtype)
    y = case.y.clone()
    adapt(*case.adapt_args(y))
    assert_true(y, case.truth, Truth.adapt)
    touched = case.truth.touched().to(y.device)
    assert_same_bits(y[~touched], case.y[~touched])


@both
def test_is_deterministic(adapt):
    case = build(PROJECTIONS[8], torch.float16)
    first, second = case.y.clone(), case.y.clone()
    adapt(*case.adapt_args(first))
    adapt(*case.adapt_args(second))
    assert_same_bits(first, second)


@both
def test_accepts_rows_of_a_wider_buffer(adapt):
    case = build(PROJECTIONS[4], torch.float32)
    rows, out = case.y.shape
    buffer = torch.full((rows, out + 9), float("nan"), device=case.y.device)
    y = buffer[:, 4 : 4 + out]
    y.copy_(case.y)
    case.x = torch.cat([case.x, torch.full_like(case.x, float("nan"))], 1)[:, : case.x.shape[1]]
    adapt(*case.adapt_args(y))
    assert_true(y, case.truth, Truth.adapt)
    assert buffer[:, :4].isnan().all()
    assert buffer[:, 4 + out :].isnan().all()


@both
def test_accepts_the_view_of_one_layer_in_the_table_of_a_model(adapt):
    case = build(PROJECTIONS[4], torch.float32)
    table = case.layer["table"]
    model = torch.full((table.shape[0], 11, table.shape[2]), 2**30, dtype=torch.int32, device=table.device)
    case.layer["table"] = model[:, 5 : 5 + table.shape[1]]
    case.layer["table"].copy_(table)
    y = case.y.clone()
    adapt(*case.adapt_args(y))
    assert_true(y, case.truth, Truth.adapt)


@pytest.mark.parametrize("spec", [PROJECTIONS[4], PROJECTIONS[-1]], ids=str)
@both
def test_a_layer_without_pairs_ignores_those_of_its_batch(adapt, spec: Spec):
    """The plan is the batch's. A layer whose shards are no run of outputs has no pairs, and what lies before its table
    is another layer's."""
    case = build(spec, torch.float32)
    table = case.layer["table"]
    table[..., Field.FLAGS] &= ~int(Flag.SHARED)
    poisoned = torch.ones(table.shape[0] + 9, *table.shape[1:], dtype=torch.int32, device=table.device)
    poisoned[9:] = table
    none = case.layer["shared_a"].new_empty(0, 0, 0)
    case.layer |= {"table": poisoned[9:], "shared_a": none, "shared_b": none, "pair_rank": case.layer["pair_rank"][:0]}
    case.truth.shared.clear()
    y = case.y.clone()
    adapt(*case.adapt_args(y))
    assert_true(y, case.truth, Truth.adapt)


@both
def test_does_nothing_when_not_live(adapt):
    case = build(PROJECTIONS[4], torch.float32)
    case.plan.live[0] = 0
    y = case.y.clone()
    adapt(*case.adapt_args(y))
    assert_same_bits(y, case.y)


def test_float16_keeps_the_mantissa_of_the_shrunk_row():
    """A rank-1 term whose shrunk value needs more than 11 bits: 2049 * 1 - 2048 must be 1, not 0."""
    case = build(PROJECTIONS[2], torch.float16)
    factors, entry = case.layer["factors"], case.layer["table"][1, 0]
    in_features, out, per_unit = case.x.shape[1], case.y.shape[1], UNIT_BYTES // 2
    a, b = (int(entry[column]) * per_unit for column in (Field.A, Field.B))
    entry[Field.RANK], entry[Field.FLAGS] = 2, 0
    factors[a : a + 2 * in_features] = 0
    factors[a : a + 2] = torch.tensor([2048, 1])
    factors[a + in_features] = 2048
    factors[b : b + out] = 1
    factors[b + out : b + 2 * out] = -1
    case.x.fill_(1)
    y = torch.zeros_like(case.y)
    launch.adapt(*case.adapt_args(y))
    assert torch.equal(y, torch.ones_like(y))

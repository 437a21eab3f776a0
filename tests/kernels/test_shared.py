import pytest
import torch
from kernel_cases import PROJECTIONS, Spec, Truth, assert_same_bits, assert_true, build

from scute.kernels import reference, shared

IMPLEMENTATIONS = [
    pytest.param(reference.shared, torch.float64, id="reference-float64"),
    pytest.param(reference.shared, torch.float32, id="reference-float32"),
    pytest.param(reference.shared, torch.float16, id="reference-float16"),
    pytest.param(shared.shared, torch.float32, id="triton-float32"),
    pytest.param(shared.shared, torch.float16, id="triton-float16"),
]


@pytest.mark.parametrize("spec", PROJECTIONS, ids=str)
@pytest.mark.parametrize(("shared_term", "dtype"), IMPLEMENTATIONS)
def test_equals_the_normal_form_row_by_row(shared_term, dtype: torch.dtype, spec: Spec):
    case = build(spec, dtype)
    y = case.y.clone()
    shared_term(*case.shared_args(y))
    truth = case.truth
    assert_true(y, truth, Truth.shared_term)
    touched = truth.touched(truth.shared).to(y.device)
    assert_same_bits(y[~touched], case.y[~touched])


@pytest.mark.parametrize("shared_term", [reference.shared, shared.shared])
def test_is_deterministic(shared_term):
    case = build(PROJECTIONS[8], torch.float16)
    first, second = case.y.clone(), case.y.clone()
    shared_term(*case.shared_args(first))
    shared_term(*case.shared_args(second))
    assert_same_bits(first, second)


@pytest.mark.parametrize("shared_term", [reference.shared, shared.shared])
def test_does_nothing_when_not_live(shared_term):
    case = build(PROJECTIONS[4], torch.float32)
    case.plan.live[1] = 0
    y = case.y.clone()
    shared_term(*case.shared_args(y))
    assert_same_bits(y, case.y)


@pytest.mark.parametrize("shared_term", [reference.shared, shared.shared])
def test_batch_without_shared_rows_under_forced_routes(shared_term):
    case = build(PROJECTIONS[2], torch.float32)
    case.plan.live.fill_(1)
    y = case.y.clone()
    shared_term(*case.shared_args(y))
    assert_same_bits(y, case.y)

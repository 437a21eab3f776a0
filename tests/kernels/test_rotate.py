import dataclasses
from itertools import pairwise

import pytest
import torch
from kernel_cases import (
    PROJECTIONS,
    ROTATIONS,
    TOGETHER,
    Case,
    Spec,
    Truth,
    assert_close,
    assert_same_bits,
    assert_true,
    build,
)

from scute.kernels import launch, reference
from scute.kernels.routes import Route

IMPLEMENTATIONS = [
    pytest.param(reference, torch.float64, id="reference-float64"),
    pytest.param(reference, torch.float32, id="reference-float32"),
    pytest.param(reference, torch.float16, id="reference-float16"),
    pytest.param(launch, torch.float32, id="triton-float32"),
    pytest.param(launch, torch.float16, id="triton-float16"),
]


@pytest.mark.parametrize("spec", ROTATIONS, ids=str)
@pytest.mark.parametrize(("module", "dtype"), IMPLEMENTATIONS)
def test_rotates_row_by_row_and_copies_the_rest(module, dtype: torch.dtype, spec: Spec):
    case = build(spec, dtype)
    out = module.rotate(*case.rotate_args())
    truth = case.truth
    slots = spec.slot_of_token + (-1,) * spec.padding
    assert out.shape == (len(spec.slices), *case.x.shape)
    assert_true(out, truth, Truth.rotate)
    for i in range(len(spec.slices)):
        copied = [row for row, slot in enumerate(slots) if (slot, i) not in truth.blocks]
        assert_same_bits(out[i, copied], case.x[copied])


@pytest.mark.parametrize("spec", ROTATIONS, ids=str)
@pytest.mark.parametrize(("module", "dtype"), IMPLEMENTATIONS)
def test_linear_gives_every_slice_its_own_input(module, dtype: torch.dtype, spec: Spec):
    case = build(spec, dtype)
    real, starts = slice(0, len(spec.slot_of_token)), case.layer["slice_starts"]
    case.plan.live[Route.LOW_RANK] = 0
    y = module.linear(*case.linear_args())
    inputs = module.rotate(*case.rotate_args())[:, real].double().cpu()
    weight, bias = case.weight.double().cpu(), case.bias.double().cpu()
    for i, (start, end) in enumerate(pairwise(starts)):
        part, part_bias = weight[start:end].T, bias[start:end]
        magnitude = inputs[i].abs() @ part.abs() + part_bias.abs()
        assert_close(y[real, start:end], inputs[i] @ part + part_bias, magnitude)


@pytest.mark.parametrize("module", [reference, launch])
def test_linear_takes_no_bias(module):
    case = build(ROTATIONS[0], torch.float32)
    x, weight, _, *rest = case.linear_args()
    y = module.linear(x, weight, None, *rest)
    expected = module.linear(*case.linear_args())
    torch.testing.assert_close(y + case.bias, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("module", [reference, launch])
def test_not_live_is_the_plain_projection(module):
    case = build(ROTATIONS[0], torch.float32)
    case.plan.live.zero_()
    assert_same_bits(module.rotate(*case.rotate_args()), case.x.repeat(3, 1, 1))
    plain = torch.nn.functional.linear(case.x, case.weight, case.bias)
    assert_same_bits(module.linear(*case.linear_args()), plain)


@pytest.mark.parametrize("spec", TOGETHER, ids=str)
@pytest.mark.parametrize(("module", "dtype"), IMPLEMENTATIONS)
def test_linear_rotates_and_adapts(module, dtype: torch.dtype, spec: Spec):
    case = build(spec, dtype)
    y = module.linear(*case.linear_args())
    rotated = dataclasses.replace(case.truth, y=_project(case, case.truth.rotate(), absolute=False))
    magnitude = case.truth.absolute()
    magnitude.y = _project(case, magnitude.rotate(), absolute=True)
    real = slice(0, len(spec.slot_of_token))
    # The base output is rounded once before the adapter's terms are added.
    bound = magnitude.adapt()[real] + torch.finfo(dtype).eps * 2**19 * magnitude.y[real]
    assert_close(y[real], rotated.adapt()[real], bound)


def _project(case: Case, inputs: torch.Tensor, *, absolute: bool) -> torch.Tensor:
    """The base projection of every slice on its own input, in float64."""
    weight, bias = case.weight.double().cpu(), case.bias.double().cpu()
    if absolute:
        weight, bias = weight.abs(), bias.abs()
    parts = [
        inputs[i] @ weight[start:end].T + bias[start:end] for i, (start, end) in enumerate(pairwise(_starts(case)))
    ]
    return torch.cat(parts, dim=1)


def _starts(case: Case) -> list[int]:
    return case.layer["slice_starts"]


@pytest.mark.parametrize("module", [reference, launch])
def test_linear_also_adapts(module):
    case = build(PROJECTIONS[4], torch.float32)
    y = torch.nn.functional.linear(case.x, case.weight, case.bias)
    module.adapt(*case.adapt_args(y))
    assert_same_bits(module.linear(*case.linear_args()), y)


@pytest.mark.parametrize("module", [reference, launch])
def test_is_deterministic(module):
    case = build(ROTATIONS[2], torch.float16)
    assert_same_bits(module.rotate(*case.rotate_args()), module.rotate(*case.rotate_args()))

"""A whole layer: rotation, base GEMM, shrink and expand, in the launches that its batch gets."""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
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
    batch,
    build,
)

from scute.kernels import launch, launch_decode, launch_rotate, sizes
from scute.kernels.blocks import GemmBlocks

# Triton's interpreter multiplies the bits of bfloat16.
DTYPES = [torch.float16, torch.float32, *([torch.bfloat16] if torch.cuda.is_available() else [])]
SPECS = [
    *PROJECTIONS,
    *(replace(spec, name=f"turned-{spec.name}") for spec in ROTATIONS),
    *(replace(spec, name=f"together-{spec.name}") for spec in TOGETHER),
    Spec("more-than-one-tile", 48, (16, 8, 8), TOGETHER[0].adapters, batch(90, 11), padding=3, pair_ranks=(5, 12)),
    Spec("few-of-many", 40, (24, 8), TOGETHER[0].adapters[:8], (1,) * 33 + (6, 4, -1), padding=5, pair_ranks=(5, 140)),
]


def exact(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """What the layer gives, in float64, and the sum of the absolute values of all terms."""
    weight, bias = case.weight.cpu().double(), case.bias.cpu().double()

    def run(truth: Truth, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        inputs = truth.rotate()
        parts = [
            inputs[i] @ weight[start:end].T + bias[start:end]
            for i, (start, end) in enumerate(pairwise(case.layer["slice_starts"]))
        ]
        return replace(truth, y=torch.cat(parts, dim=1)).adapt()

    return run(case.truth, weight, bias), run(case.truth.absolute(), weight.abs(), bias.abs())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_linear(spec: Spec, dtype: torch.dtype):
    case = build(spec, dtype)
    y = launch.linear(*case.linear_args())
    expected, magnitude = exact(case)
    real = slice(0, len(spec.slot_of_token))
    # A rotated row is rounded before the GEMM, and so is the base model's row where the expand is a launch of its own.
    rounded = torch.finfo(dtype).eps / 2 * magnitude
    assert_close(y[real], expected[real], (2**20 * rounded + magnitude)[real])
    assert_same_bits(y[real], launch.linear(*case.linear_args())[real])


@pytest.mark.parametrize(("rows", "slots"), [(30, range(8)), (258, range(8))], ids=["decode", "prefill"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(
    dtype: torch.dtype, rows: int, slots: Sequence[int], monkeypatch: pytest.MonkeyPatch
):
    """Its adapter's chunks are elsewhere in the list then, beside those of other adapters, some of longer ranks."""
    # The interpreter multiplies by BLAS, where the order of a row's sum may follow from its place in the tile.
    monkeypatch.setattr(np, "matmul", partial(np.einsum, "...ij,...jk->...ik"))
    spec = Spec("alone", 64, (32, 16), TOGETHER[0].adapters[:8], batch(rows, 8, 2), pair_ranks=(5, 40))
    full = build(spec, dtype)
    full.weight.zero_()  # so may the library's GEMM
    y = launch.linear(*full.linear_args())
    for slot in slots:
        kept = [row for row, owner in enumerate(spec.slot_of_token) if owner == slot]
        alone = replace(spec, slot_of_token=tuple(o if o == slot else -1 for o in spec.slot_of_token))
        case = build(alone, dtype)
        case.layer, case.x, case.weight, case.bias = full.layer, full.x, full.weight, full.bias
        assert_same_bits(launch.linear(*case.linear_args())[kept], y[kept])


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("spec", [s for s in SPECS if len(s.slices) > 1 and any(a.widths for a in s.adapters)], ids=str)
def test_the_shrink_beside_one_gemm_over_all_slices(spec: Spec, splits: int, monkeypatch: pytest.MonkeyPatch):
    """As on a Hopper; there the two also overlap."""
    apart = build(spec, torch.float16)
    expected = launch.linear(*apart.linear_args())
    small = GemmBlocks(16, 16, 16, 4, 2, splits)
    monkeypatch.setattr(sizes, "gemm_blocks", lambda *_: small)
    monkeypatch.setattr(launch_rotate, "has_fused_gemm", lambda x, slots: 0 < x.shape[0] <= 64 and slots.slices > 1)
    case = build(spec, torch.float16)
    y = launch.linear(*case.linear_args())
    real = slice(0, len(spec.slot_of_token))
    torch.testing.assert_close(y[real], expected[real], rtol=2e-3, atol=2e-3)
    assert_same_bits(y[real], launch.linear(*case.linear_args())[real])
    assert not case.layer["arrivals"].any()


def test_the_shrink_beside_the_gemm_is_not_given_the_memory_of_its_inputs(monkeypatch: pytest.MonkeyPatch):
    spec = next(s for s in TOGETHER if len(s.slices) > 1)
    inputs: list[weakref.ref[torch.Tensor]] = []
    rotate, fused_linear, shrink = launch_rotate.rotate, launch_rotate.fused_linear, launch_decode.shrink

    def watched_rotate(*arguments: Any) -> torch.Tensor:
        rotated = rotate(*arguments)
        inputs.append(weakref.ref(rotated))
        return rotated

    def watched_gemm(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        y, partial = fused_linear(*arguments)
        inputs.append(weakref.ref(partial))
        return y, partial

    def watched_shrink(*arguments: Any, beside_gemm: bool = False) -> Any:
        assert beside_gemm
        assert [ref() is not None for ref in inputs] == [True, True]
        return shrink(*arguments, beside_gemm=beside_gemm)

    monkeypatch.setattr(launch_rotate, "has_fused_gemm", lambda _x, slots: slots.slices > 1)
    monkeypatch.setattr(launch_rotate, "rotate", watched_rotate)
    monkeypatch.setattr(launch_rotate, "fused_linear", watched_gemm)
    monkeypatch.setattr(launch_decode, "shrink", watched_shrink)
    case = build(spec, torch.float16)
    launch.linear(*case.linear_args())
    assert inputs

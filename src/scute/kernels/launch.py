"""The ops on CUDA tensors: which kernels a batch needs, in order."""

from collections.abc import Iterator

import torch
import triton
from torch import Tensor
from torch.nn import functional

from scute.kernels import launch_decode, launch_prefill, sizes
from scute.kernels.arguments import Slots, unpack
from scute.kernels.fused_gemm import fused_gemm
from scute.kernels.gemm import sliced_linear
from scute.kernels.grid import are_aligned, column_blocks, is_hopper, launch_options, unit_width
from scute.kernels.plan import HEIGHTS, SMALL_TILE, BatchPlan, tile_count, tile_height
from scute.kernels.rotate import rotate as rotate_kernel
from scute.kernels.routes import Part, Route

FUSED_GEMM_TOKENS = 64
"""Most rows for which one GEMM over all slices beats one a slice."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: object) -> Tensor:
    """The op `linear`."""
    slots, plan = unpack(arguments)
    if not slots.rotation_width or not plan.is_live(Route.ROTATION) or not len(x):
        y = functional.linear(x, weight, bias)
        adapt(y, x, *arguments)
    elif tile_height(len(x)) == SMALL_TILE and plan.is_live(Route.LOW_RANK):
        slots = _without_idle_pairs(slots, plan)
        inputs, shrunk = launch_decode.rotate_with_shrink(x, slots, plan)
        y = _gemm_of_slices(inputs, weight, bias, slots)
        launch_decode.expand(y, shrunk, slots, plan)
    else:
        y = _rotated_gemms(x, weight, bias, slots, plan)
        adapt(y, x, *arguments)
    return y


def adapt(y: Tensor, x: Tensor, *arguments: object) -> None:
    """The op `adapt`: one shrink and one expand for all slots and pairs."""
    slots, plan = unpack(arguments)
    if not len(x) or not plan.is_live(Route.LOW_RANK):
        return
    slots = _without_idle_pairs(slots, plan)
    if tile_height(len(x)) == SMALL_TILE:
        launch_decode.expand(y, launch_decode.shrink(x, slots, plan), slots, plan)
    else:
        launch_prefill.adapt(y, x, slots, plan)


def rotate(x: Tensor, *arguments: object) -> Tensor:
    """The op `rotate`."""
    slots, plan = unpack(arguments)
    out = torch.empty(slots.slices, *x.shape, dtype=x.dtype, device=x.device)
    for index in range(slots.slices):
        out[index].copy_(x)
    if plan.is_live(Route.ROTATION) and len(x):
        _rotate_rows(out, x, slots, plan, 0)
    return out


def _rotated_gemms(x: Tensor, weight: Tensor, bias: Tensor | None, slots: Slots, plan: BatchPlan) -> Tensor:
    """The base GEMM slice by slice, on one copy of x in which the rows of rotating slots change from slice to slice."""
    turned = x.clone(memory_format=torch.contiguous_format)

    def inputs() -> Iterator[Tensor]:
        for index in range(slots.slices):
            _rotate_rows(turned.unsqueeze(0), x, slots, plan, index)
            yield turned

    return sliced_linear(inputs(), weight, bias, slots.slice_starts)


def _rotate_rows(out: Tensor, x: Tensor, slots: Slots, plan: BatchPlan, first_slice: int) -> None:
    """Write the rows of rotating slots, for slice `first_slice` to out[0], for the next to out[1], and so on."""
    tokens, in_features = x.shape
    blocks = sizes.rotate_blocks(in_features, slots.rotation_width, x.element_size())
    height = tile_height(tokens)
    tiles = plan.tiles(Route.ROTATION, tile_count(tokens, height, len(slots.table)))
    rotate_kernel[(triton.cdiv(in_features, blocks.columns), tiles, len(out))](
        out,
        x,
        slots.factors,
        slots.table,
        plan.part(Part(Part.ROTATED_SMALL + HEIGHTS.index(height))),
        plan.part(Part.ROWS),
        tokens,
        first_slice,
        in_features,
        x.stride(0),
        slots.table.stride(0),
        HEIGHT=height,
        BLOCK=blocks.block,
        COLUMNS=blocks.columns,
        WIDEST=unit_width(slots),
        num_warps=blocks.warps,
        num_stages=1,
        **launch_options(x),
    )


def _gemm_of_slices(inputs: Tensor, weight: Tensor, bias: Tensor | None, slots: Slots) -> Tensor:
    if slots.slices > 1 and inputs.shape[1] <= FUSED_GEMM_TOKENS and is_hopper(inputs):
        return _fused_linear(inputs, weight, bias, slots)
    return sliced_linear(inputs, weight, bias, slots.slice_starts)


def _fused_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, slots: Slots) -> Tensor:
    """As `sliced_linear`, in one launch."""
    _, tokens, in_features = inputs.shape
    y = torch.empty(tokens, weight.shape[0], dtype=inputs.dtype, device=inputs.device)
    blocks = sizes.gemm_blocks(tokens, weight.shape[0], inputs.element_size())
    fused_gemm[(column_blocks(slots, blocks.outer), triton.cdiv(tokens, blocks.rows))](
        y,
        inputs,
        weight,
        bias,
        tuple(slots.slice_starts),
        tokens,
        in_features,
        weight.stride(0),
        y.stride(0),
        SLICES=slots.slices,
        HAS_BIAS=bias is not None,
        ALIGNED=are_aligned(slots),
        BLOCK_M=blocks.rows,
        BLOCK_N=blocks.outer,
        BLOCK_K=blocks.inner,
        STAGES=blocks.stages,
        num_warps=blocks.warps,
        num_stages=1,
        **launch_options(inputs),
    )
    return y


def _without_idle_pairs(slots: Slots, plan: BatchPlan) -> Slots:
    """Without shared pairs where no row needs one: neither is read then."""
    if plan.is_live(Route.SHARED):
        return slots
    return slots._replace(shared_a=slots.shared_a[:0, :0], shared_b=slots.shared_b[:0, :0])

"""Launches of the rotation, and of the base GEMMs whose slices have an input each."""

from collections.abc import Iterator

import torch
from torch import Tensor

from scute.kernels import sizes
from scute.kernels.arguments import Slots
from scute.kernels.arrivals import gemm_part
from scute.kernels.blocks import RotateBlocks, ceil_div
from scute.kernels.fused_gemm import fused_gemm
from scute.kernels.gemm import sliced_linear
from scute.kernels.grid import are_aligned, column_blocks, is_roomy, launch_options, unit_width
from scute.kernels.plan import (
    HEIGHTS,
    SMALL_TILE,
    BatchPlan,
    tile_count,
    tile_height,
)
from scute.kernels.rotate import copy_and_rotate
from scute.kernels.rotate import rotate as rotate_kernel
from scute.kernels.routes import FUSED_GEMM_TOKENS, TOGETHER_TOKENS, Part, Route

COPY_ROWS = 32
TILES_AT_ONCE = 8
"""Of a small batch: a graph is captured for more tiles than there will be, so programs go on to a next one."""


def rotate(x: Tensor, slots: Slots, plan: BatchPlan) -> Tensor:
    """[slices, T, in], as the op `rotate`."""
    if not plan.is_live(Route.ROTATION) or not x.shape[0]:
        return x.expand(slots.slices, *x.shape).clone(memory_format=torch.contiguous_format)
    return _copy_and_rotate(x, slots, plan, slots.slices)


def rotated_gemms(x: Tensor, weight: Tensor, bias: Tensor | None, slots: Slots, plan: BatchPlan) -> Tensor:
    """The rotation and the base GEMMs of a large batch."""
    if x.shape[0] <= TOGETHER_TOKENS:
        return sliced_linear(rotate(x, slots, plan), weight, bias, slots.slice_starts)
    return sliced_linear(_inputs_in_turn(x, slots, plan), weight, bias, slots.slice_starts)


def has_fused_gemm(x: Tensor, slots: Slots) -> bool:
    """Whether one GEMM over all slices beats one a slice, for inputs like x [T, in]."""
    return slots.slices > 1 and x.shape[0] <= FUSED_GEMM_TOKENS and is_roomy(x)


def _inputs_in_turn(x: Tensor, slots: Slots, plan: BatchPlan) -> Iterator[Tensor]:
    """The input of each slice: one copy of x, in which the rows of rotating slots change from slice to slice."""
    turned = _copy_and_rotate(x, slots, plan, 1)[0]
    yield turned
    for index in range(1, slots.slices):
        _rotate_rows(turned, x, slots, plan, index)
        yield turned


def _copy_and_rotate(x: Tensor, slots: Slots, plan: BatchPlan, slices: int) -> Tensor:
    """[slices, T, in]: the inputs of the first slices."""
    tokens, in_features = x.shape
    out = torch.empty(slices, tokens, in_features, dtype=x.dtype, device=x.device)
    blocks, height, tiles = _sizes(x, slots, plan)
    at_once = min(tiles, TILES_AT_ONCE) if height == SMALL_TILE else tiles
    parts = at_once + ceil_div(tokens, COPY_ROWS)
    copy_and_rotate[(ceil_div(in_features, blocks.columns), parts, slices)](
        out,
        x,
        slots.factors,
        slots.table,
        plan.part(Part(Part.ROTATED_SMALL + HEIGHTS.index(height))),
        plan.part(Part.ROWS),
        plan.part(Part.SLOT_OF_ROW),
        tokens,
        at_once,
        tiles,
        in_features,
        x.stride(0),
        slots.table.stride(0),
        HEIGHT=height,
        COPY_ROWS=COPY_ROWS,
        BLOCK=blocks.block,
        COLUMNS=blocks.columns,
        WIDEST=unit_width(slots),
        num_warps=blocks.warps,
        num_stages=1,
        **launch_options(x),
    )
    return out


def _rotate_rows(out: Tensor, x: Tensor, slots: Slots, plan: BatchPlan, slice_index: int) -> None:
    """Write the rows of rotating slots, for one slice, to out [T, in]."""
    in_features = x.shape[1]
    blocks, height, tiles = _sizes(x, slots, plan)
    rotate_kernel[(ceil_div(in_features, blocks.columns), tiles)](
        out,
        x,
        slots.factors,
        slots.table,
        plan.part(Part(Part.ROTATED_SMALL + HEIGHTS.index(height))),
        plan.part(Part.ROWS),
        slice_index,
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


def _sizes(x: Tensor, slots: Slots, plan: BatchPlan) -> tuple[RotateBlocks, int, int]:
    """(blocks, rows of a tile, tiles to launch)."""
    height = tile_height(x.shape[0])
    tiles = plan.tiles(Route.ROTATION, tile_count(x.shape[0], height, slots.table.shape[0]))
    return sizes.rotate_blocks(x.shape[1], slots.rotation_width, x.element_size()), height, tiles


def fused_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, slots: Slots) -> tuple[Tensor, Tensor]:
    """As `sliced_linear`, in one launch; and its partial sums, which are its own until a launch has waited for it."""
    _, tokens, in_features = inputs.shape
    y = torch.empty(tokens, weight.shape[0], dtype=inputs.dtype, device=inputs.device)
    blocks = sizes.gemm_blocks(tokens, weight.shape[0], inputs.element_size())
    grid = column_blocks(slots, blocks.outer), ceil_div(tokens, blocks.rows)
    arrivals = gemm_part(slots.arrivals, slots.shared_a)
    splits = blocks.splits if grid[0] * grid[1] <= arrivals.numel() else 1
    partial = torch.empty(splits * y.numel() if splits > 1 else 0, dtype=torch.float32, device=y.device)
    fused_gemm[(*grid, splits)](
        y,
        inputs,
        weight,
        weight if bias is None else bias,
        partial,
        arrivals,
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
        SPLITS=splits,
        STAGES=blocks.stages,
        num_warps=blocks.warps,
        num_stages=1,
        **launch_options(inputs),
    )
    return y, partial

"""Launches of the kernels of a prefill batch."""

from typing import NamedTuple

import torch
from torch import Tensor

from scute.kernels import sizes
from scute.kernels.arguments import Slots
from scute.kernels.blocks import PrefillBlocks, ceil_div, power_of_2, round_up
from scute.kernels.grid import are_aligned, column_blocks, has_room, launch_options, shared_a_of, shared_rank_of
from scute.kernels.plan import (
    LARGE_TILE,
    PAIR_HEIGHTS,
    RANK_CHUNKS,
    BatchPlan,
    shrink_items,
    tile_count,
)
from scute.kernels.prefill_expand import expand_tiles
from scute.kernels.prefill_pairs import expand_pair_tiles, finish_pair_shrink
from scute.kernels.prefill_shrink import shrink_pair_tiles, shrink_tiles
from scute.kernels.routes import Part, Route

PAIR_TILE = PAIR_HEIGHTS[1]
PAIR_RANK_CHUNK = 128
"""Ranks of a pair that one program shrinks: many, so that x is read less often."""


class Shrunk(NamedTuple):
    """What the shrink wrote, and what all launches have to agree on.

    partial: split by split, slice by slice and row by row; shared_partial: split by split and row by row; rows of both
    are padded to `stride_*` ranks, so that the expand may read whole blocks of ranks. ranks: the most that a slot has.
    """

    partial: Tensor
    shared_partial: Tensor
    stride_partial: int
    stride_shared_partial: int
    ranks: int
    splits: int
    tiles: int
    shared_tiles: int
    blocks: PrefillBlocks


def adapt(y: Tensor, x: Tensor, slots: Slots, plan: BatchPlan) -> None:
    """Shrink of all slots and pairs, then the expand of slots and that of pairs, which write different rows."""
    shrunk = _shrink(x, slots, plan)
    _expand(y, shrunk, slots, plan)
    if shrunk.shared_tiles:
        _expand_pairs(y, shrunk, slots, plan)


def _shrink(x: Tensor, slots: Slots, plan: BatchPlan) -> Shrunk:
    tokens, in_features = x.shape
    shared_rank, ranks = shared_rank_of(slots, plan), plan.ranks(slots.max_rank)
    blocks = sizes.prefill_blocks(in_features, shared_rank, x.element_size())
    splits = ceil_div(in_features, blocks.split_width)
    stride_partial = round_up(ranks, blocks.long_rank if ranks > blocks.rank else blocks.rank)
    stride_shared_partial = round_up(shared_rank, max(blocks.shared_rank, blocks.long_rank))
    shrunk = Shrunk(
        torch.empty(splits * slots.slices * tokens * stride_partial, dtype=torch.float32, device=x.device),
        torch.empty(splits * tokens * stride_shared_partial, dtype=torch.float32, device=x.device),
        stride_partial,
        stride_shared_partial,
        ranks,
        splits,
        plan.tiles(Route.LOW_RANK, tile_count(tokens, LARGE_TILE, slots.table.shape[0])),
        plan.tiles(Route.SHARED, tile_count(tokens, PAIR_TILE, slots.shared_a.shape[0])),
        blocks,
    )
    items = shrink_items(shrunk.tiles, ranks, 1)
    if items:
        shrink_tiles[(items * slots.slices, splits)](
            x,
            slots.factors,
            slots.table,
            plan.part(Part.SHRINK_LARGE),
            plan.part(Part.ROWS),
            shrunk.partial,
            tokens,
            in_features,
            stride_partial,
            x.stride(0),
            slots.table.stride(0),
            SLICES=slots.slices,
            CHUNK=RANK_CHUNKS[1],
            SPLIT_WIDTH=blocks.split_width,
            HEIGHT=LARGE_TILE,
            BLOCK_R=blocks.rank,
            LONG_BLOCK_R=blocks.long_rank if ranks > blocks.rank else 0,
            BLOCK_K=blocks.inner,
            STAGES=blocks.shrink_stages,
            num_warps=blocks.shrink_warps,
            num_stages=1,
            **launch_options(x),
        )
    if shrunk.shared_tiles:
        _shrink_pairs(x, shrunk, slots, plan, shared_rank)
    return shrunk


def _shrink_pairs(x: Tensor, shrunk: Shrunk, slots: Slots, plan: BatchPlan, shared_rank: int) -> None:
    blocks, chunks = shrunk.blocks, ceil_div(shared_rank, PAIR_RANK_CHUNK)
    shrink_pair_tiles[(shrunk.shared_tiles * chunks, shrunk.splits)](
        x,
        shared_a_of(slots),
        slots.pair_rank,
        plan.part(Part.SHARED_TILES_LARGE),
        plan.part(Part.SHARED_ROWS),
        shrunk.shared_partial,
        *x.shape,
        chunks,
        shrunk.stride_shared_partial,
        x.stride(0),
        slots.shared_a.stride(0),
        slots.shared_a.stride(1),
        CHUNK=PAIR_RANK_CHUNK,
        SPLIT_WIDTH=blocks.split_width,
        HEIGHT=PAIR_TILE,
        BLOCK_R=blocks.shared_shrink,
        BLOCK_K=blocks.inner,
        STAGES=blocks.shrink_stages,
        num_warps=blocks.shrink_warps,
        num_stages=1,
        **launch_options(x),
    )


def _expand(y: Tensor, shrunk: Shrunk, slots: Slots, plan: BatchPlan) -> None:
    blocks = shrunk.blocks
    columns = column_blocks(slots, blocks.outer * blocks.steps)
    expand_tiles[(shrunk.tiles * columns,)](
        y,
        shrunk.partial,
        shrunk.shared_partial,
        slots.factors,
        slots.vectors,
        slots.table,
        slots.shared_b,
        slots.pair_rank,
        plan.part(Part.TILES_LARGE),
        plan.part(Part.ROWS),
        tuple(slots.slice_starts),
        tuple(slots.out_offsets),
        y.shape[0],
        columns,
        shrunk.stride_partial,
        shrunk.stride_shared_partial,
        y.stride(0),
        slots.table.stride(0),
        slots.shared_b.stride(0),
        slots.shared_b.stride(1),
        SLICES=slots.slices,
        SPLITS=shrunk.splits,
        SHARED=shrunk.shared_tiles > 0,
        ALIGNED=are_aligned(slots),
        HEIGHT=LARGE_TILE,
        BLOCK_R=blocks.rank,
        LONG_BLOCK_R=blocks.long_rank,
        LONG=shrunk.ranks > blocks.rank,
        BLOCK_N=blocks.outer,
        STEPS=blocks.steps,
        STAGES=blocks.expand_stages,
        num_warps=blocks.expand_warps,
        num_stages=1,
        **launch_options(y),
    )


def _expand_pairs(y: Tensor, shrunk: Shrunk, slots: Slots, plan: BatchPlan) -> None:
    blocks, tokens, parts = shrunk.blocks, y.shape[0], 1 if y.dtype == torch.float32 else 2
    tiles, rows = plan.part(Part.SHARED_TILES_LARGE), plan.part(Part.SHARED_ROWS)
    stride = shrunk.stride_shared_partial
    h = torch.empty(slots.slices * tokens * parts * stride, dtype=y.dtype, device=y.device)
    rank_blocks = stride // blocks.shared_rank
    finish_pair_shrink[(shrunk.shared_tiles * rank_blocks,)](
        h,
        shrunk.shared_partial,
        slots.vectors,
        slots.table,
        slots.pair_rank,
        tiles,
        rows,
        plan.part(Part.SLOT_OF_ROW),
        tokens,
        rank_blocks,
        stride,
        slots.table.stride(0),
        SLICES=slots.slices,
        SPLITS=shrunk.splits,
        PARTS=parts,
        HEIGHT=PAIR_TILE,
        BLOCK_R=blocks.shared_rank,
        num_warps=4,
        num_stages=1,
        **launch_options(y),
    )
    ranks = power_of_2(stride)
    columns = column_blocks(slots, blocks.shared_outer * blocks.shared_steps)
    expand_pair_tiles[(shrunk.shared_tiles * columns,)](
        y,
        h,
        slots.vectors,
        slots.table,
        slots.shared_b,
        slots.pair_rank,
        tiles,
        rows,
        plan.part(Part.SLOT_OF_ROW),
        tuple(slots.slice_starts),
        tuple(slots.out_offsets),
        tokens,
        columns,
        stride,
        y.stride(0),
        slots.table.stride(0),
        slots.shared_b.stride(0),
        slots.shared_b.stride(1),
        SLICES=slots.slices,
        PARTS=parts,
        ALIGNED=are_aligned(slots),
        HEIGHT=PAIR_TILE,
        RANKS=ranks if ranks <= blocks.shared_kept and has_room(y) else 0,
        BLOCK_R=blocks.shared_rank,
        BLOCK_N=blocks.shared_outer,
        STEPS=blocks.shared_steps,
        STAGES=blocks.shared_stages,
        num_warps=blocks.shared_warps,
        num_stages=1,
        **launch_options(y),
    )

"""Launches of the kernels of a decode batch: a shrink, on its own or with the rotation, and an expand."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from scute.kernels import sizes
from scute.kernels.arguments import Slots
from scute.kernels.blocks import DecodeBlocks, ceil_div, round_up
from scute.kernels.decode_expand import expand_rows
from scute.kernels.decode_shrink import shrink_rows
from scute.kernels.decode_turn import turn_and_shrink
from scute.kernels.grid import are_aligned, column_blocks, launch_options, shared_a_of, shared_rank_of, unit_width
from scute.kernels.plan import RANK_CHUNKS, SMALL_TILE, BatchPlan, shrink_items, tile_count
from scute.kernels.routes import Part, Route

COPY_ROWS = 16
# A graph is captured for more tiles and items than there will be: so many are done at once, and their programs go on.
ROTATING_TILES = 8
SHARED_TILES = 2


class Shrunk(NamedTuple):
    """What a shrink wrote, and what both launches have to agree on.

    h: slice by slice and row by row; shared_h: split by split and row by row; rows of both are padded to `stride_*`
    ranks, so that the expand may read whole blocks of ranks. tiles, shared_tiles: that the launches cover. shared_rank:
    0 where no row needs a shared pair.
    """

    h: Tensor
    shared_h: Tensor
    stride_h: int
    stride_shared_h: int
    tiles: int
    shared_tiles: int
    shared_rank: int
    blocks: DecodeBlocks


def shrink(x: Tensor, slots: Slots, plan: BatchPlan, *, beside_gemm: bool = False) -> Shrunk:
    """One launch for all slots and pairs. beside_gemm: `fused_gemm` is the launch before, and runs meanwhile."""
    shrunk = _room_for(x, slots, plan)
    parts, launched, items = _shrink_grid(shrunk, slots)
    if items:
        shrink_rows[(launched * parts, slots.slices)](
            x,
            slots.factors,
            slots.table,
            shared_a_of(slots),
            slots.pair_rank,
            plan.part(Part.SHRINK_SMALL),
            plan.part(Part.ROWS),
            plan.part(Part.SHARED_ROWS),
            shrunk.h,
            shrunk.shared_h,
            items,
            *x.shape,
            *_strides(x, shrunk, slots),
            PARTS=parts,
            BESIDE_GEMM=beside_gemm,
            num_warps=shrunk.blocks.shrink_warps,
            **_shrink_constants(x, shrunk),
            **launch_options(x),
        )
    return shrunk


def rotate_with_shrink(x: Tensor, slots: Slots, plan: BatchPlan) -> tuple[Tensor, Shrunk]:
    """([slices, T, in] as the op `rotate` gives it, what `shrink` gives), in one launch."""
    tokens, in_features = x.shape
    shrunk = _room_for(x, slots, plan)
    parts, launched, items = _shrink_grid(shrunk, slots)
    turn = sizes.rotate_blocks(in_features, slots.rotation_width, x.element_size())
    columns = ceil_div(in_features, turn.columns)
    turning = columns * (ROTATING_TILES + ceil_div(tokens, COPY_ROWS))
    out = torch.empty(slots.slices, tokens, in_features, dtype=x.dtype, device=x.device)
    turn_and_shrink[((parts * launched + turning) * slots.slices,)](
        out,
        x,
        slots.factors,
        slots.table,
        shared_a_of(slots),
        slots.pair_rank,
        plan.part(Part.ROTATED_SMALL),
        plan.part(Part.SHRINK_SMALL),
        plan.part(Part.ROWS),
        plan.part(Part.SHARED_ROWS),
        plan.part(Part.SLOT_OF_ROW),
        shrunk.h,
        shrunk.shared_h,
        tokens,
        plan.tiles(Route.ROTATION, tile_count(tokens, SMALL_TILE, slots.table.shape[0])),
        launched,
        items,
        parts,
        columns,
        in_features,
        *_strides(x, shrunk, slots),
        SLICES=slots.slices,
        TILES=ROTATING_TILES,
        COPY_ROWS=COPY_ROWS,
        BLOCK=turn.block,
        COLUMNS=turn.columns,
        WIDEST=unit_width(slots),
        num_warps=shrunk.blocks.shrink_warps,
        num_stages=1,
        **_shrink_constants(x, shrunk),
        **launch_options(x),
    )
    return out, shrunk


def expand(y: Tensor, shrunk: Shrunk, slots: Slots, plan: BatchPlan) -> None:
    """One launch for all slots and pairs."""
    blocks = shrunk.blocks
    own_blocks, shared_blocks = column_blocks(slots, blocks.outer), column_blocks(slots, blocks.shared_outer)
    shared_programs = min(shrunk.shared_tiles, SHARED_TILES) * shared_blocks
    expand_rows[(shared_programs + shrunk.tiles * own_blocks,)](
        y,
        shrunk.h,
        shrunk.shared_h,
        slots.factors,
        slots.vectors,
        slots.table,
        slots.shared_b,
        slots.pair_rank,
        plan.part(Part.TILES_SMALL),
        plan.part(Part.SHARED_TILES_SMALL),
        plan.part(Part.ROWS),
        plan.part(Part.SHARED_ROWS),
        plan.part(Part.SLOT_OF_ROW),
        tuple(slots.slice_starts),
        tuple(slots.out_offsets),
        y.shape[0],
        shared_programs,
        shrunk.shared_tiles,
        own_blocks,
        shared_blocks,
        shrunk.stride_h,
        shrunk.stride_shared_h,
        y.stride(0),
        slots.table.stride(0),
        slots.shared_b.stride(0),
        slots.shared_b.stride(1),
        SLICES=slots.slices,
        SHARED=shrunk.shared_rank > 0,
        SHARED_SPLITS=blocks.shared_splits,
        ALIGNED=are_aligned(slots),
        HEIGHT=SMALL_TILE,
        BLOCK_R=blocks.rank,
        BLOCK_N=blocks.outer,
        SHARED_BLOCK_R=blocks.shared_rank,
        SHARED_BLOCK_N=blocks.shared_outer,
        num_warps=blocks.expand_warps,
        num_stages=1,
        maxnreg=blocks.expand_registers,
        **launch_options(y),
    )


def _room_for(x: Tensor, slots: Slots, plan: BatchPlan) -> Shrunk:
    tokens, in_features = x.shape
    shared_rank = shared_rank_of(slots, plan)
    blocks = sizes.decode_blocks(in_features, slots.slice_starts[-1], shared_rank, x.element_size())
    stride_h, stride_shared_h = round_up(slots.max_rank, blocks.rank), round_up(shared_rank, blocks.shared_rank)
    return Shrunk(
        torch.empty(slots.slices * tokens * stride_h, dtype=torch.float32, device=x.device),
        torch.empty(blocks.shared_splits * tokens * stride_shared_h, dtype=torch.float32, device=x.device),
        stride_h,
        stride_shared_h,
        plan.tiles(Route.LOW_RANK, tile_count(tokens, SMALL_TILE, slots.table.shape[0])),
        plan.tiles(Route.SHARED, tile_count(tokens, SMALL_TILE, slots.shared_a.shape[0])),
        shared_rank,
        blocks,
    )


def _shrink_grid(shrunk: Shrunk, slots: Slots) -> tuple[int, int, int]:
    """(programs of an item on a slice, items at once, most items): at once, two chunks a tile, or all of a pair."""
    chunk, shared_rank = RANK_CHUNKS[0], shrunk.shared_rank
    parts = max(ceil_div(chunk, shrunk.blocks.ranks), shrunk.blocks.shared_splits if shared_rank else 0)
    items = shrink_items(shrunk.tiles, slots.max_rank, shrunk.shared_tiles, shared_rank, 0)
    at_once = max(shrunk.tiles * min(2, ceil_div(slots.max_rank, chunk)), ceil_div(shared_rank, chunk))
    return parts, min(items, at_once), items


def _strides(x: Tensor, shrunk: Shrunk, slots: Slots) -> tuple[int, ...]:
    strides = (x.stride(0), slots.table.stride(0), slots.shared_a.stride(0), slots.shared_a.stride(1))
    return (shrunk.stride_h, shrunk.stride_shared_h, *strides)


def _shrink_constants(x: Tensor, shrunk: Shrunk) -> dict[str, Any]:
    blocks = shrunk.blocks
    return {
        "SHARED": shrunk.shared_rank > 0,
        "SHARED_SPLITS": blocks.shared_splits,
        "SHARED_BLOCK_K": blocks.shared_inner,
        "HEIGHT": SMALL_TILE,
        "CHUNK": RANK_CHUNKS[0],
        "RANKS": blocks.ranks,
        "BLOCK_K": blocks.inner,
        "ONE_BLOCK": blocks.inner >= x.shape[1],
    }

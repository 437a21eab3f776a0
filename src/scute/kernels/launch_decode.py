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
from scute.kernels.plan import PAIR_CHUNK, RANK_CHUNKS, SMALL_TILE, BatchPlan, shrink_items, tile_count
from scute.kernels.routes import Part, Route

COPY_ROWS = 16
# A graph is captured for more tiles and items than there will be: so many are done at once, and their programs go on.
ROTATING_TILES = 8
SHARED_TILES = 2


class Shrunk(NamedTuple):
    """What a shrink wrote, and what both launches have to agree on.

    h: slice by slice and row by row; shared_h: row by row; rows of both are padded to `stride_*` ranks, so that the
    expand may read whole blocks of ranks. shared_partial: as shared_h, split by split. ranks: the most that a
    slot has. tiles, shared_tiles: that the launches cover. shared_rank: 0 where no row needs a shared pair.
    """

    h: Tensor
    shared_h: Tensor
    shared_partial: Tensor
    stride_h: int
    stride_shared_h: int
    ranks: int
    tiles: int
    shared_tiles: int
    shared_rank: int
    blocks: DecodeBlocks


def shrink(x: Tensor, slots: Slots, plan: BatchPlan, *, beside_gemm: bool = False) -> Shrunk:
    """One launch for all slots and pairs. beside_gemm: `fused_gemm` is the launch before, and runs meanwhile."""
    shrunk = _room_for(x, slots, plan)
    grid = _shrink_grid(shrunk, slots)
    if grid.programs:
        shrink_rows[(grid.programs,)](
            x,
            slots.factors,
            slots.table,
            shared_a_of(slots),
            slots.pair_rank,
            plan.part(Part.SHRINK_SMALL),
            plan.part(Part.SHARED_TILES_SMALL),
            plan.part(Part.ROWS),
            plan.part(Part.SHARED_ROWS),
            shrunk.h,
            shrunk.shared_h,
            shrunk.shared_partial,
            slots.arrivals,
            x.shape[0],
            *grid.stepwise,
            x.shape[1],
            *_strides(x, shrunk, slots),
            BESIDE_GEMM=beside_gemm,
            num_warps=shrunk.blocks.shrink_warps,
            **_shrink_constants(x, shrunk, grid, slots),
            **launch_options(x),
        )
    return shrunk


def rotate_with_shrink(x: Tensor, slots: Slots, plan: BatchPlan) -> tuple[Tensor, Shrunk]:
    """([slices, T, in] as the op `rotate` gives it, what `shrink` gives), in one launch."""
    tokens, in_features = x.shape
    shrunk = _room_for(x, slots, plan)
    grid = _shrink_grid(shrunk, slots)
    turn = sizes.rotate_blocks(in_features, slots.rotation_width, x.element_size())
    columns = ceil_div(in_features, turn.columns)
    turning = columns * (ROTATING_TILES + ceil_div(tokens, COPY_ROWS)) * slots.slices
    items_launched, *_ = grid.stepwise
    out = torch.empty(slots.slices, tokens, in_features, dtype=x.dtype, device=x.device)
    turn_and_shrink[(grid.programs + turning,)](
        out,
        x,
        slots.factors,
        slots.table,
        shared_a_of(slots),
        slots.pair_rank,
        plan.part(Part.ROTATED_SMALL),
        plan.part(Part.SHRINK_SMALL),
        plan.part(Part.SHARED_TILES_SMALL),
        plan.part(Part.ROWS),
        plan.part(Part.SHARED_ROWS),
        plan.part(Part.SLOT_OF_ROW),
        shrunk.h,
        shrunk.shared_h,
        shrunk.shared_partial,
        slots.arrivals,
        tokens,
        plan.tiles(Route.ROTATION, tile_count(tokens, SMALL_TILE, slots.table.shape[0])),
        *grid.stepwise,
        min(items_launched, shrunk.tiles),
        turning,
        columns,
        in_features,
        *_strides(x, shrunk, slots),
        TILES=ROTATING_TILES,
        COPY_ROWS=COPY_ROWS,
        BLOCK=turn.block,
        COLUMNS=turn.columns,
        WIDEST=unit_width(slots),
        num_warps=shrunk.blocks.shrink_warps,
        num_stages=1,
        **_shrink_constants(x, shrunk, grid, slots),
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
    shared_h = torch.empty(1 + blocks.shared_splits, tokens * stride_shared_h, dtype=torch.float32, device=x.device)
    return Shrunk(
        torch.empty(slots.slices * tokens * stride_h, dtype=torch.float32, device=x.device),
        shared_h[0],
        shared_h[1:],
        stride_h,
        stride_shared_h,
        plan.ranks(slots.max_rank),
        plan.tiles(Route.LOW_RANK, tile_count(tokens, SMALL_TILE, slots.table.shape[0])),
        plan.tiles(Route.SHARED, tile_count(tokens, SMALL_TILE, slots.shared_a.shape[0])),
        shared_rank,
        blocks,
    )


class _ShrinkGrid(NamedTuple):
    """stepwise: items at once, most items, pairs' tiles at once, most of these. parts: programs of an item on a slice.

    chunks: of the ranks of a pair. At once: two items a tile, and SHARED_TILES of pairs.
    """

    programs: int
    stepwise: tuple[int, int, int, int]
    parts: int
    chunks: int


def _shrink_grid(shrunk: Shrunk, slots: Slots) -> _ShrinkGrid:
    blocks, chunk = shrunk.blocks, RANK_CHUNKS[0]
    parts, chunks = ceil_div(chunk, blocks.ranks), ceil_div(shrunk.shared_rank, PAIR_CHUNK)
    items = shrink_items(shrunk.tiles, shrunk.ranks, 0)
    items_launched, pairs_launched = min(items, 2 * shrunk.tiles), min(shrunk.shared_tiles, SHARED_TILES)
    programs = items_launched * parts * slots.slices + pairs_launched * chunks * blocks.shared_splits
    return _ShrinkGrid(programs, (items_launched, items, pairs_launched, shrunk.shared_tiles), parts, chunks)


def _strides(x: Tensor, shrunk: Shrunk, slots: Slots) -> tuple[int, ...]:
    strides = (x.stride(0), slots.table.stride(0), slots.shared_a.stride(0), slots.shared_a.stride(1))
    return (shrunk.stride_h, shrunk.stride_shared_h, *strides)


def _shrink_constants(x: Tensor, shrunk: Shrunk, grid: _ShrinkGrid, slots: Slots) -> dict[str, Any]:
    blocks = shrunk.blocks
    return {
        "SLICES": slots.slices,
        "PARTS": grid.parts,
        "SHARED_CHUNKS": grid.chunks,
        "SHARED_SPLITS": blocks.shared_splits,
        "SHARED_BLOCK_K": blocks.shared_inner,
        "HEIGHT": SMALL_TILE,
        "CHUNK": PAIR_CHUNK,
        "RANKS": blocks.ranks,
        "BLOCK_K": blocks.inner,
        "ONE_BLOCK": blocks.inner >= x.shape[1],
    }

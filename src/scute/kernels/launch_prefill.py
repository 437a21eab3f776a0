"""Launches of the kernels of a prefill batch."""

import torch
import triton
from torch import Tensor

from scute.kernels import sizes
from scute.kernels.arguments import Plan, Slots
from scute.kernels.blocks import round_up
from scute.kernels.grid import are_aligned, column_blocks, launch_options
from scute.kernels.plan import LARGE_TILE, RANK_CHUNKS, shrink_items, tile_count
from scute.kernels.prefill_expand import expand_tiles
from scute.kernels.prefill_shrink import shrink_tiles
from scute.kernels.routes import Part, Route


def adapt(y: Tensor, x: Tensor, slots: Slots, plan: Plan) -> None:
    """Shrink and expand of all slots and pairs."""
    tokens, in_features = x.shape
    pairs, shared_rank, _ = slots.shared_a.shape
    tiles = plan.tiles(Route.LOW_RANK, tile_count(tokens, LARGE_TILE, len(slots.table)))
    shared_tiles = plan.tiles(Route.SHARED, tile_count(tokens, LARGE_TILE, pairs))
    blocks = sizes.prefill_blocks(in_features, slots.max_rank, shared_rank, x.element_size())
    splits = triton.cdiv(in_features, blocks.split_width)
    pdl = launch_options(x)
    # Rows of the sums are padded, so that the expand may read whole blocks of ranks.
    stride_partial = round_up(slots.max_rank, blocks.rank)
    stride_shared_partial = round_up(round_up(shared_rank, blocks.shared_rank), blocks.rank)
    partial = torch.empty(splits * slots.slices * tokens * stride_partial, dtype=torch.float32, device=x.device)
    shared_partial = torch.empty(splits * tokens * stride_shared_partial, dtype=torch.float32, device=x.device)
    chunk = RANK_CHUNKS[1]
    items = shrink_items(tiles, slots.max_rank, shared_tiles, shared_rank, chunk)
    if items:
        shrink_tiles[(items, splits, slots.slices)](
            x,
            slots.factors,
            slots.table,
            slots.shared_a[:, :, slots.in_offset :],
            slots.pair_rank,
            plan.part(Part.SHRINK_LARGE),
            plan.part(Part.ROWS),
            plan.part(Part.SHARED_ROWS),
            partial,
            shared_partial,
            tokens,
            in_features,
            stride_partial,
            stride_shared_partial,
            x.stride(0),
            slots.table.stride(0),
            slots.shared_a.stride(0),
            slots.shared_a.stride(1),
            SLICES=slots.slices,
            CHUNK=chunk,
            SPLIT_WIDTH=blocks.split_width,
            SHARED=shared_rank > 0,
            HEIGHT=LARGE_TILE,
            BLOCK_R=blocks.rank,
            SHARED_BLOCK_R=blocks.shared_rank,
            BLOCK_K=blocks.inner,
            STAGES=blocks.shrink_stages,
            num_warps=blocks.shrink_warps,
            num_stages=1,
            **pdl,
        )
    own_blocks = column_blocks(slots, blocks.outer * blocks.steps)
    shared_blocks = column_blocks(slots, blocks.outer)
    expand_tiles[(tiles * own_blocks + shared_tiles * shared_blocks,)](
        y,
        partial,
        shared_partial,
        slots.factors,
        slots.vectors,
        slots.table,
        slots.shared_b,
        slots.pair_rank,
        plan.part(Part.TILES_LARGE),
        plan.part(Part.SHARED_TILES_LARGE),
        plan.part(Part.ROWS),
        plan.part(Part.SHARED_ROWS),
        plan.part(Part.SLOT_OF_ROW),
        tuple(slots.slice_starts),
        tuple(slots.out_offsets),
        tokens,
        tiles * own_blocks,
        own_blocks,
        shared_blocks,
        stride_partial,
        stride_shared_partial,
        y.stride(0),
        slots.table.stride(0),
        slots.shared_b.stride(0),
        slots.shared_b.stride(1),
        SLICES=slots.slices,
        SPLITS=splits,
        SHARED=shared_rank > 0,
        ALIGNED=are_aligned(slots),
        HEIGHT=LARGE_TILE,
        BLOCK_R=blocks.rank,
        BLOCK_N=blocks.outer,
        STEPS=blocks.steps,
        STAGES=blocks.expand_stages,
        SHARED_BLOCK_R=blocks.shared_rank,
        num_warps=blocks.expand_warps,
        num_stages=1,
        **pdl,
    )

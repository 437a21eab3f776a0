"""The ops on CUDA tensors: sizes, buffers and grids of the Triton kernels."""

from itertools import pairwise

import torch
import triton
from torch import Tensor
from torch.nn import functional

from scute.kernels.arguments import Plan, Slots, unpack
from scute.kernels.decode_expand import expand_rows
from scute.kernels.decode_shrink import shrink_rows
from scute.kernels.fused_gemm import fused_gemm
from scute.kernels.gemm import sliced_linear
from scute.kernels.plan import (
    HEIGHTS,
    LARGE_TILE,
    RANK_CHUNKS,
    SMALL_TILE,
    shrink_items,
    tile_count,
    tile_height,
)
from scute.kernels.prefill_expand import expand_tiles
from scute.kernels.prefill_shrink import shrink_tiles
from scute.kernels.rotate import rotate as rotate_kernel
from scute.kernels.routes import Part, Route
from scute.kernels.tiles import decode_blocks, gemm_blocks, prefill_blocks, rotate_blocks

COPY_ROWS = 16
FUSED_GEMM_TOKENS = 64
"""Most rows for which one GEMM over all slices beats one a slice."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: object) -> Tensor:
    """The op `linear`."""
    slots, plan = unpack(arguments)
    if slots.rotation_width and plan.is_live(Route.ROTATION):
        inputs = rotate(x, *arguments)
        if slots.slices > 1 and len(x) <= FUSED_GEMM_TOKENS and _is_hopper(x):
            y = _fused_linear(inputs, weight, bias, slots)
        else:
            y = sliced_linear(inputs, weight, bias, slots.slice_starts)
    else:
        y = functional.linear(x, weight, bias)
    adapt(y, x, *arguments)
    return y


def _fused_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, slots: Slots) -> Tensor:
    """As `sliced_linear`, in one launch."""
    _, tokens, in_features = inputs.shape
    y = torch.empty(tokens, weight.shape[0], dtype=inputs.dtype, device=inputs.device)
    blocks = gemm_blocks(tokens, weight.shape[0], inputs.element_size())
    fused_gemm[(_column_blocks(slots, blocks.outer), triton.cdiv(tokens, blocks.rows))](
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
        ALIGNED=_are_aligned(slots),
        BLOCK_M=blocks.rows,
        BLOCK_N=blocks.outer,
        BLOCK_K=blocks.inner,
        STAGES=blocks.stages,
        num_warps=blocks.warps,
        num_stages=1,
        **_launch_options(inputs),
    )
    return y


def adapt(y: Tensor, x: Tensor, *arguments: object) -> None:
    """The op `adapt`: one shrink and one expand for all slots and pairs."""
    slots, plan = unpack(arguments)
    if not len(x) or not plan.is_live(Route.LOW_RANK):
        return
    if not plan.is_live(Route.SHARED):  # neither is read then
        slots = slots._replace(shared_a=slots.shared_a[:0, :0], shared_b=slots.shared_b[:0, :0])
    height = tile_height(len(x))
    tiles, shared_tiles = (tile_count(len(x), height, len(segments)) for segments in (slots.table, slots.shared_a))
    if height == SMALL_TILE:
        _adapt_rows(y, x, slots, plan, tiles, shared_tiles)
    else:
        _adapt_tiles(y, x, slots, plan, tiles, shared_tiles)


def _adapt_rows(y: Tensor, x: Tensor, slots: Slots, plan: Plan, tiles: int, shared_tiles: int) -> None:
    tokens, in_features = x.shape
    shared_rank = slots.shared_a.shape[1]
    blocks = decode_blocks(in_features, slots.slice_starts[-1], shared_rank, x.element_size())
    pdl = _launch_options(x)
    # Rows of h are padded, so that the expand may read whole blocks of ranks.
    stride_h, stride_shared_h = _up(slots.max_rank, blocks.rank), _up(shared_rank, blocks.shared_rank)
    h = torch.empty(slots.slices * tokens * stride_h, dtype=torch.float32, device=x.device)
    shared_h = torch.empty(blocks.shared_splits * tokens * stride_shared_h, dtype=torch.float32, device=x.device)
    chunk = RANK_CHUNKS[0]
    items = shrink_items(tiles, slots.max_rank, shared_tiles, shared_rank, chunk)
    if items:
        shrink_rows[(max(chunk // blocks.ranks, blocks.shared_splits if shared_rank else 0), items, slots.slices)](
            x,
            slots.factors,
            slots.table,
            slots.shared_a[:, :, slots.in_offset :],
            slots.pair_rank,
            plan.part(Part.SHRINK_SMALL),
            plan.part(Part.ROWS),
            plan.part(Part.SHARED_ROWS),
            h,
            shared_h,
            tokens,
            in_features,
            stride_h,
            stride_shared_h,
            x.stride(0),
            slots.table.stride(0),
            slots.shared_a.stride(0),
            slots.shared_a.stride(1),
            SHARED=shared_rank > 0,
            SHARED_SPLITS=blocks.shared_splits,
            SHARED_BLOCK_K=blocks.shared_inner,
            HEIGHT=SMALL_TILE,
            CHUNK=chunk,
            RANKS=blocks.ranks,
            BLOCK_K=blocks.inner,
            ONE_BLOCK=blocks.inner >= in_features,
            num_warps=blocks.shrink_warps,
            **pdl,
        )
    own_blocks, shared_blocks = _column_blocks(slots, blocks.outer), _column_blocks(slots, blocks.shared_outer)
    expand_rows[(tiles * own_blocks + shared_tiles * shared_blocks,)](
        y,
        h,
        shared_h,
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
        tokens,
        tiles * own_blocks,
        own_blocks,
        shared_blocks,
        stride_h,
        stride_shared_h,
        y.stride(0),
        slots.table.stride(0),
        slots.shared_b.stride(0),
        slots.shared_b.stride(1),
        SLICES=slots.slices,
        SHARED=shared_rank > 0,
        SHARED_SPLITS=blocks.shared_splits,
        ALIGNED=_are_aligned(slots),
        HEIGHT=SMALL_TILE,
        BLOCK_R=blocks.rank,
        BLOCK_N=blocks.outer,
        SHARED_BLOCK_R=blocks.shared_rank,
        SHARED_BLOCK_N=blocks.shared_outer,
        num_warps=blocks.expand_warps,
        num_stages=1,
        maxnreg=blocks.expand_registers,
        **pdl,
    )


def _adapt_tiles(y: Tensor, x: Tensor, slots: Slots, plan: Plan, tiles: int, shared_tiles: int) -> None:
    tokens, in_features = x.shape
    shared_rank = slots.shared_a.shape[1]
    blocks = prefill_blocks(in_features, slots.max_rank, shared_rank, x.element_size())
    splits = triton.cdiv(in_features, blocks.split_width)
    pdl = _launch_options(x)
    # Rows of the sums are padded, so that the expand may read whole blocks of ranks.
    stride_partial = _up(slots.max_rank, blocks.rank)
    stride_shared_partial = _up(_up(shared_rank, blocks.shared_rank), blocks.rank)
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
            chunk,
            stride_partial,
            stride_shared_partial,
            x.stride(0),
            slots.table.stride(0),
            slots.shared_a.stride(0),
            slots.shared_a.stride(1),
            SLICES=slots.slices,
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
    own_blocks = _column_blocks(slots, blocks.outer * blocks.steps)
    shared_blocks = _column_blocks(slots, blocks.outer)
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
        ALIGNED=_are_aligned(slots),
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


def rotate(x: Tensor, *arguments: object) -> Tensor:
    """The op `rotate`."""
    slots, plan = unpack(arguments)
    tokens, in_features = x.shape
    if not plan.is_live(Route.ROTATION) or not tokens:
        return x.unsqueeze(0).repeat(slots.slices, 1, 1)
    blocks = rotate_blocks(in_features, slots.rotation_width, x.element_size())
    height = tile_height(tokens)
    tiles = programs = plan.tiles(Route.ROTATION, tile_count(tokens, height, len(slots.table)))
    if height == SMALL_TILE:
        out = torch.empty(slots.slices, tokens, in_features, dtype=x.dtype, device=x.device)
        programs += triton.cdiv(tokens, COPY_ROWS)
    else:  # where copying takes long, a copy that does nothing else is faster
        out = x.unsqueeze(0).repeat(slots.slices, 1, 1)
    rotate_kernel[(triton.cdiv(in_features, blocks.columns), programs, slots.slices)](
        out,
        x,
        slots.factors,
        slots.table,
        plan.part(Part(Part.ROTATED_SMALL + HEIGHTS.index(height))),
        plan.part(Part.ROWS),
        plan.part(Part.SLOT_OF_ROW),
        tokens,
        tiles,
        in_features,
        x.stride(0),
        slots.table.stride(0),
        HEIGHT=height,
        BLOCK=blocks.block,
        COLUMNS=blocks.columns,
        WIDEST=slots.rotation_width if slots.rotation_width in (16, 32, 64) else 0,
        num_warps=blocks.warps,
        num_stages=1,
        **_launch_options(x),
    )
    return out


def _column_blocks(slots: Slots, width: int) -> int:
    return sum(-(-(end - start) // width) for start, end in pairwise(slots.slice_starts))


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _are_aligned(slots: Slots) -> bool:
    return all(start % 16 == 0 for start in (*slots.slice_starts, *slots.out_offsets))


def _launch_options(x: Tensor) -> dict[str, bool]:
    """Programmatic dependent launch: a kernel starts while the one before it ends."""
    return {"PDL": True, "launch_pdl": True} if _is_hopper(x) else {"PDL": False}


def _is_hopper(x: Tensor) -> bool:
    """Hopper or later: it has programmatic dependent launch, and shared memory for a deep GEMM."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device)[0] >= 9

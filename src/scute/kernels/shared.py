"""The shared term: one pair of factors for the rows of all its adapters, d and e per row (paper, section 4.1)."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from scute.kernels.blocks import EXPAND_STAGES, SHRINK_STAGES, WARPS, choose_blocks
from scute.kernels.device import dot_wide, load_tile, shrink_block, sum_splits
from scute.kernels.plan import tiles_for
from scute.kernels.routes import Flag, Route

_SHARED = tl.constexpr(int(Flag.SHARED))


def shared(
    y: Tensor,
    x: Tensor,
    shared_a: Tensor,
    shared_b: Tensor,
    pair_rank: Tensor,
    d: Tensor,
    e: Tensor,
    table: Tensor,
    slice_starts: Tensor,
    out_offsets: Tensor,
    max_slice: int,
    in_offset: int,
    shared_rows: Tensor,
    shared_tiles_small: Tensor,
    shared_tiles_large: Tensor,
    slot_of_row: Tensor,
    live: Tensor,
) -> None:
    """Launch the op `shared` on CUDA tensors."""
    tokens, in_features = x.shape
    pairs, max_rank, _ = shared_a.shape
    if not live.tolist()[Route.SHARED] or not tokens or not max_rank:
        return
    slices = len(out_offsets)
    tiles, launched, height = tiles_for(tokens, pairs, shared_tiles_small, shared_tiles_large)
    blocks = choose_blocks(height, in_features, max_rank, x.element_size())
    partial = torch.empty(blocks.splits, tokens, max_rank, dtype=torch.float32, device=x.device)
    _shrink[(launched, blocks.splits, triton.cdiv(max_rank, blocks.rank))](
        x,
        shared_a[:, :, in_offset:],
        partial,
        pair_rank,
        shared_rows,
        tiles,
        in_features,
        blocks.split_width,
        x.stride(0),
        shared_a.stride(0),
        shared_a.stride(1),
        partial.stride(0),
        max_rank,
        HEIGHT=height,
        BLOCK_R=blocks.rank,
        BLOCK_K=blocks.inner,
        num_warps=WARPS,
        num_stages=SHRINK_STAGES,
    )
    _expand[(launched, triton.cdiv(max_slice, blocks.outer), slices)](
        y,
        partial,
        shared_b,
        pair_rank,
        d,
        e,
        table,
        slice_starts,
        out_offsets,
        slot_of_row,
        shared_rows,
        tiles,
        slices,
        blocks.splits,
        y.stride(0),
        shared_b.stride(0),
        shared_b.stride(1),
        d.stride(0),
        d.stride(1),
        e.stride(0),
        partial.stride(0),
        max_rank,
        HEIGHT=height,
        BLOCK_R=blocks.rank,
        BLOCK_N=blocks.outer,
        num_warps=WARPS,
        num_stages=EXPAND_STAGES,
    )


@triton.jit(do_not_specialize=["stride_split"])
def _shrink(
    x,
    a,
    partial,
    pair_rank,
    rows,
    tiles,
    in_features,
    split_width,
    stride_x,
    stride_a_pair,
    stride_a,
    stride_split,
    stride_partial,
    HEIGHT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """partial[split, position, :rank] = x[row] A^T over the columns of one split; grid (tile, split, rank block)."""
    pair, first, count, row, row_mask = load_tile(tiles, rows, tl.program_id(0), HEIGHT)
    if count == 0:
        return
    rank = tl.load(pair_rank + pair)
    rank_start = tl.program_id(2) * BLOCK_R
    if rank_start >= rank:
        return
    split = tl.program_id(1)
    shrink_block(
        x,
        row,
        row_mask,
        a + pair.to(tl.int64) * stride_a_pair,
        rank_start,
        rank,
        split * split_width,
        split_width,
        in_features,
        partial + split.to(tl.int64) * stride_split + first.to(tl.int64) * stride_partial,
        stride_x,
        stride_a,
        stride_partial,
        HEIGHT,
        BLOCK_R,
        BLOCK_K,
    )


@triton.jit(do_not_specialize=["stride_split"])
def _expand(
    y,
    partial,
    b,
    pair_rank,
    d,
    e,
    table,
    slice_starts,
    out_offsets,
    slot_of_row,
    rows,
    tiles,
    slices,
    splits,
    stride_y,
    stride_b_pair,
    stride_b,
    stride_d,
    stride_d_slice,
    stride_e,
    stride_split,
    stride_partial,
    HEIGHT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """y[row, slice] += ((partial * d[slot]) B) * e[slot]; grid (tile, block of columns, slice)."""
    pair, first, count, row, row_mask = load_tile(tiles, rows, tl.program_id(0), HEIGHT)
    if count == 0:
        return
    slice_index = tl.program_id(2)
    start = tl.load(slice_starts + slice_index)
    end = tl.load(slice_starts + slice_index + 1)
    offset = tl.program_id(1) * BLOCK_N
    if start + offset >= end:
        return
    # A tile mixes the adapters of its pair, and not every one of them has the term on this slice.
    slot = tl.load(slot_of_row + row, mask=row_mask, other=0)
    flags = tl.load(table + (slot * slices + slice_index) * 2 + 1, mask=row_mask, other=0)
    row_mask = (flags & _SHARED) != 0
    if tl.max(flags & _SHARED, axis=0) == 0:
        return
    rank = tl.load(pair_rank + pair)
    out_offset = tl.load(out_offsets + slice_index)
    slot = slot.to(tl.int64)
    y += row[:, None] * stride_y
    partial += first.to(tl.int64) * stride_partial
    b += pair.to(tl.int64) * stride_b_pair
    d += slot[:, None] * stride_d + slice_index.to(tl.int64) * stride_d_slice
    e += slot[:, None] * stride_e
    # The bounds come from memory; only a visible multiple of 16 lets the compiler vectorise loads and stores.
    if (start % 16 == 0) & (end % 16 == 0) & (out_offset % 16 == 0):
        start = start // 16 * 16
        end = end // 16 * 16
        out_offset = out_offset // 16 * 16
        _expand_block(
            y, row_mask, partial, b + out_offset + offset, d, e, rank, start + offset, end,
            splits, stride_split, stride_partial, stride_b, HEIGHT, BLOCK_R, BLOCK_N,
        )  # fmt: skip
    else:
        _expand_block(
            y, row_mask, partial, b + out_offset + offset, d, e, rank, start + offset, end,
            splits, stride_split, stride_partial, stride_b, HEIGHT, BLOCK_R, BLOCK_N,
        )  # fmt: skip


@triton.jit
def _expand_block(
    y_rows,
    row_mask,
    partial,
    b_columns,
    d_rows,
    e_rows,
    rank,
    column_start,
    column_end,
    splits,
    stride_split,
    stride_partial,
    stride_b,
    HEIGHT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    column = column_start + tl.arange(0, BLOCK_N)
    column_mask = column < column_end
    lane = tl.arange(0, HEIGHT).to(tl.int64)
    acc = tl.zeros((HEIGHT, BLOCK_N), dtype=tl.float32)
    for rank_start in range(0, rank, BLOCK_R):
        r = rank_start + tl.arange(0, BLOCK_R)
        h_mask = row_mask[:, None] & (r < rank)[None, :]
        h = sum_splits(partial + lane[:, None] * stride_partial + r[None, :], h_mask, splits, stride_split)
        h *= tl.load(d_rows + r[None, :], mask=h_mask, other=0.0)
        b_block = tl.load(
            b_columns + r[:, None].to(tl.int64) * stride_b + tl.arange(0, BLOCK_N)[None, :],
            mask=(r < rank)[:, None] & column_mask[None, :],
            other=0.0,
        )
        acc = dot_wide(h, b_block, acc)
    mask = row_mask[:, None] & column_mask[None, :]
    total = tl.load(y_rows + column[None, :], mask=mask, other=0.0).to(tl.float32)
    total += acc * tl.load(e_rows + column[None, :], mask=mask, other=0.0)
    tl.store(y_rows + column[None, :], total.to(y_rows.dtype.element_ty), mask=mask)

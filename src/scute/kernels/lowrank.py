"""The low-rank pass: a shrink to the adapter's rank, and an expand that carries s and b (paper, section 4.1)."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from scute.kernels.blocks import EXPAND_STAGES, SHRINK_STAGES, WARPS, choose_blocks
from scute.kernels.device import dot_wide, load_tile, shrink_block, sum_splits
from scute.kernels.plan import tiles_for
from scute.kernels.routes import Flag, Route

_SCALE = tl.constexpr(int(Flag.SCALE))
_SHIFT = tl.constexpr(int(Flag.SHIFT))


def low_rank(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    row_start: Tensor,
    table: Tensor,
    scale: Tensor,
    shift: Tensor,
    slice_starts: Tensor,
    max_slice: int,
    max_rank: int,
    rows: Tensor,
    tiles_small: Tensor,
    tiles_large: Tensor,
    live: Tensor,
) -> None:
    """Launch the op `low_rank` on CUDA tensors."""
    tokens = x.shape[0]
    if not live.tolist()[Route.LOW_RANK] or not tokens:
        return
    slices, _, in_features = a.shape
    tiles, launched, height = tiles_for(tokens, len(row_start), tiles_small, tiles_large)
    blocks = choose_blocks(height, in_features, max_rank, x.element_size())
    partial = torch.empty(blocks.splits, slices, tokens, max_rank, dtype=torch.float32, device=x.device)
    if max_rank:
        _shrink[(launched, blocks.splits, slices)](
            x,
            a,
            partial,
            row_start,
            table,
            rows,
            tiles,
            in_features,
            slices,
            blocks.split_width,
            x.stride(0),
            a.stride(0),
            a.stride(1),
            partial.stride(0),
            partial.stride(1),
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
        b,
        row_start,
        table,
        scale,
        shift,
        slice_starts,
        rows,
        tiles,
        slices,
        blocks.splits,
        y.stride(0),
        b.stride(0),
        scale.stride(0),
        shift.stride(0),
        partial.stride(0),
        partial.stride(1),
        max_rank,
        HEIGHT=height,
        BLOCK_R=blocks.rank,
        BLOCK_N=blocks.outer,
        num_warps=WARPS,
        num_stages=EXPAND_STAGES,
    )


@triton.jit(do_not_specialize=["stride_split", "stride_slice"])
def _shrink(
    x,
    a,
    partial,
    row_start,
    table,
    rows,
    tiles,
    in_features,
    slices,
    split_width,
    stride_x,
    stride_a_slice,
    stride_a,
    stride_split,
    stride_slice,
    stride_partial,
    HEIGHT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """partial[split, slice, position, :rank] = x[row] A^T over the columns of one split; grid (tile, split, slice)."""
    slot, first, count, row, row_mask = load_tile(tiles, rows, tl.program_id(0), HEIGHT)
    if count == 0:
        return
    split = tl.program_id(1)
    slice_index = tl.program_id(2)
    rank = tl.load(table + (slot * slices + slice_index) * 2)
    factor = a + slice_index.to(tl.int64) * stride_a_slice + tl.load(row_start + slot).to(tl.int64) * stride_a
    partial += split.to(tl.int64) * stride_split + slice_index.to(tl.int64) * stride_slice
    partial += first.to(tl.int64) * stride_partial
    for rank_start in range(0, rank, BLOCK_R):
        shrink_block(
            x,
            row,
            row_mask,
            factor,
            rank_start,
            rank,
            split * split_width,
            split_width,
            in_features,
            partial,
            stride_x,
            stride_a,
            stride_partial,
            HEIGHT,
            BLOCK_R,
            BLOCK_K,
        )


@triton.jit(do_not_specialize=["stride_split", "stride_slice"])
def _expand(
    y,
    partial,
    b,
    row_start,
    table,
    scale,
    shift,
    slice_starts,
    rows,
    tiles,
    slices,
    splits,
    stride_y,
    stride_b,
    stride_scale,
    stride_shift,
    stride_split,
    stride_slice,
    stride_partial,
    HEIGHT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """y[row, slice] = y * s + b + partial B; grid (tile, block of columns, slice)."""
    slot, first, count, row, row_mask = load_tile(tiles, rows, tl.program_id(0), HEIGHT)
    if count == 0:
        return
    slice_index = tl.program_id(2)
    entry = table + (slot * slices + slice_index) * 2
    rank = tl.load(entry)
    flags = tl.load(entry + 1)
    if (rank == 0) & ((flags & (_SCALE | _SHIFT)) == 0):
        return
    start = tl.load(slice_starts + slice_index)
    end = tl.load(slice_starts + slice_index + 1)
    offset = tl.program_id(1) * BLOCK_N
    if start + offset >= end:
        return
    y += row[:, None] * stride_y
    partial += slice_index.to(tl.int64) * stride_slice + first.to(tl.int64) * stride_partial
    b += tl.load(row_start + slot).to(tl.int64) * stride_b
    scale += slot.to(tl.int64) * stride_scale
    shift += slot.to(tl.int64) * stride_shift
    # The bounds come from memory; only a visible multiple of 16 lets the compiler vectorise loads and stores.
    if (start % 16 == 0) & (end % 16 == 0):
        start = start // 16 * 16
        end = end // 16 * 16
        _expand_block(
            y, row_mask, partial, b, scale, shift, rank, flags, start + offset, end,
            splits, stride_split, stride_partial, stride_b, HEIGHT, BLOCK_R, BLOCK_N,
        )  # fmt: skip
    else:
        _expand_block(
            y, row_mask, partial, b, scale, shift, rank, flags, start + offset, end,
            splits, stride_split, stride_partial, stride_b, HEIGHT, BLOCK_R, BLOCK_N,
        )  # fmt: skip


@triton.jit
def _expand_block(
    y_rows,
    row_mask,
    partial,
    b,
    scale,
    shift,
    rank,
    flags,
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
        h = sum_splits(
            partial + lane[:, None] * stride_partial + r[None, :],
            row_mask[:, None] & (r < rank)[None, :],
            splits,
            stride_split,
        )
        b_block = tl.load(
            b + r[:, None].to(tl.int64) * stride_b + column[None, :],
            mask=(r < rank)[:, None] & column_mask[None, :],
            other=0.0,
        )
        acc = dot_wide(h, b_block, acc)
    mask = row_mask[:, None] & column_mask[None, :]
    total = tl.load(y_rows + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if flags & _SCALE:
        total *= tl.load(scale + column, mask=column_mask, other=0.0)[None, :]
    if flags & _SHIFT:
        total += tl.load(shift + column, mask=column_mask, other=0.0)[None, :]
    tl.store(y_rows + column[None, :], (total + acc).to(y_rows.dtype.element_ty), mask=mask)

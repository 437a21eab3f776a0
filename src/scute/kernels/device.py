"""Device functions that the low-rank and the shared kernels have in common."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl


@triton.jit
def load_tile(tiles, rows, index, HEIGHT: tl.constexpr):
    """Entry `index` of a tile list: (segment, first position, count, batch rows, which lanes hold a row)."""
    segment = tl.load(tiles + index * 3)
    first = tl.load(tiles + index * 3 + 1)
    count = tl.load(tiles + index * 3 + 2)
    lane = tl.arange(0, HEIGHT)
    mask = lane < count
    row = tl.load(rows + first + lane, mask=mask, other=0).to(tl.int64)
    return segment, first, count, row, mask


@triton.jit
def shrink_block(
    x,
    row,
    row_mask,
    factor,
    rank_start,
    rank,
    split_start,
    split_width,
    in_features,
    partial,
    stride_x,
    stride_factor,
    stride_partial,
    HEIGHT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """partial[lane, r] = sum of x[row, k] * factor[r, k] over the columns of one split, for one block of r."""
    r = rank_start + tl.arange(0, BLOCK_R)
    acc = tl.zeros((HEIGHT, BLOCK_R), dtype=tl.float32)
    for start in range(split_start, min(split_start + split_width, in_features), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x_block = tl.load(
            x + row[:, None] * stride_x + k[None, :], mask=row_mask[:, None] & (k < in_features)[None, :], other=0.0
        )
        factor_block = tl.load(
            factor + r[None, :].to(tl.int64) * stride_factor + k[:, None],
            mask=(r < rank)[None, :] & (k < in_features)[:, None],
            other=0.0,
        )
        acc = tl.dot(x_block, factor_block, acc, input_precision="ieee")
    lane = tl.arange(0, HEIGHT).to(tl.int64)
    tl.store(partial + lane[:, None] * stride_partial + r[None, :], acc, mask=row_mask[:, None] & (r < rank)[None, :])


@triton.jit
def sum_splits(partial, mask, splits, stride_split):
    """Add the partial sums of all splits, always in the same order."""
    total = tl.load(partial, mask=mask, other=0.0)
    for _ in range(1, splits):
        partial += stride_split
        total += tl.load(partial, mask=mask, other=0.0)
    return total


@triton.jit
def dot_wide(h, factor, acc):
    """acc + h @ factor for float32 h; a 16-bit factor meets h as two 16-bit parts, which keep its mantissa."""
    if factor.dtype == tl.float32:
        acc = tl.dot(h, factor, acc, input_precision="ieee")
    else:
        high = h.to(factor.dtype)
        low = (h - high.to(tl.float32)).to(factor.dtype)
        acc = tl.dot(high, factor, acc)
        acc = tl.dot(low, factor, acc)
    return acc

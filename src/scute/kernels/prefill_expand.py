"""The expand of a prefill batch for the tiles of slots: matrix units on tiles of 32 rows."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from scute.kernels.device import (
    FLAGS,
    HAS_SCALE,
    HAS_SHARED,
    HAS_SHIFT,
    PAIR,
    RANK,
    SCALE_AT,
    SHIFT_AT,
    B,
    D,
    E,
    dot_wide,
    element_of,
    entry_of,
    field,
    piece,
    slice_of,
    sum_splits,
)
from scute.kernels.kernel import kernel


@kernel("tokens")
def expand_tiles(
    y,
    partial,
    shared_partial,
    factors,
    vectors,
    table,
    shared_b,
    pair_rank,
    tiles,
    rows,
    starts,
    out_offsets,
    tokens,
    blocks,
    stride_partial,
    stride_shared_partial,
    stride_y,
    stride_slot,
    stride_pair,
    stride_shared,
    SLICES: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARED: tl.constexpr,
    ALIGNED: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    LONG_BLOCK_R: tl.constexpr,
    LONG: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = y s + b + h B + ((h_shared d) B_shared) e, for the tiles of slots; grid (tile, block of columns).

    Programs that run together have neighbouring columns, so that what they read lies together in memory. Rows that
    have nothing but the shared term on a slice are left to `expand_pair_tiles` there. LONG: whether a slot of the batch
    has more than BLOCK_R ranks; these go LONG_BLOCK_R at a time, and so does what has a shared term.
    """
    _expand_slot(
        y, partial, shared_partial, factors, vectors, table, shared_b, pair_rank, tiles, rows,
        starts, out_offsets, tl.program_id(0) // blocks, tl.program_id(0) % blocks, tokens,
        stride_partial, stride_shared_partial, stride_y, stride_slot, stride_pair, stride_shared,
        SLICES, SPLITS, SHARED, ALIGNED, HEIGHT, BLOCK_R, LONG_BLOCK_R, LONG, BLOCK_N, STEPS, STAGES, PDL,
    )  # fmt: skip
    # What follows waits for this launch alone, so it must not end before those before it.
    if PDL:
        gdc_wait()


@triton.jit
def _expand_slot(
    y,
    partial,
    shared_partial,
    factors,
    vectors,
    table,
    shared_b,
    pair_rank,
    tiles,
    rows,
    starts,
    out_offsets,
    tile,
    block,
    tokens,
    stride_partial,
    stride_shared_partial,
    stride_y,
    stride_slot,
    stride_pair,
    stride_shared,
    SLICES: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARED: tl.constexpr,
    ALIGNED: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    LONG_BLOCK_R: tl.constexpr,
    LONG: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    slot = field(tiles + tile * 3, 0)
    first = field(tiles + tile * 3, 1)
    count = field(tiles + tile * 3, 2)
    if count == 0:
        return
    slice_index, start, end, offset = slice_of(block, starts, STEPS * BLOCK_N, SLICES)
    entry = entry_of(table, slot, slice_index, stride_slot)
    rank = field(entry, RANK)
    flags = field(entry, FLAGS)
    if (rank == 0) & ((flags & (HAS_SCALE | HAS_SHIFT)) == 0):
        return
    row_mask = tl.arange(0, HEIGHT) < count
    row = tl.load(rows + first + tl.arange(0, HEIGHT), mask=row_mask, other=0).to(tl.int64)
    width = end - start
    if ALIGNED:
        start = tl.multiple_of(start, 16)
        width = tl.multiple_of(width, 16)
    last = min(offset + STEPS * BLOCK_N, width)
    wide_tokens = tokens.to(tl.int64)
    y_row = y + row[:, None] * stride_y + start
    factor = piece(factors, field(entry, B))
    scale = piece(vectors, field(entry, SCALE_AT))
    shift = piece(vectors, field(entry, SHIFT_AT))
    h_row = partial + (slice_index * wide_tokens + row[:, None]) * stride_partial
    stride_split = wide_tokens * (SLICES * stride_partial)
    if PDL:
        gdc_wait()
    is_plain = (flags & HAS_SHARED) == 0 if SHARED else True
    if is_plain & (rank <= BLOCK_R):
        _expand_plain(
            y_row, h_row, factor, scale, shift, count, rank, flags, offset, last, width, stride_split,
            SPLITS, HEIGHT, BLOCK_R, BLOCK_N, STAGES,
        )  # fmt: skip
    elif LONG and (is_plain & (rank <= LONG_BLOCK_R)):
        _expand_plain(
            y_row, h_row, factor, scale, shift, count, rank, flags, offset, last, width, stride_split,
            SPLITS, HEIGHT, LONG_BLOCK_R, BLOCK_N, STAGES,
        )  # fmt: skip
    elif LONG or SHARED:
        for at in range(offset, last, BLOCK_N):
            column = at + tl.arange(0, BLOCK_N)
            column_mask = column < last
            y_block = tl.load(y_row + column[None, :], mask=row_mask[:, None] & column_mask[None, :], other=0.0)
            acc = tl.zeros((HEIGHT, BLOCK_N), dtype=tl.float32)
            if SHARED and (flags & HAS_SHARED) != 0:
                pair = field(entry, PAIR).to(tl.int64)
                ranks = tl.load(pair_rank + pair)
                shared_row = shared_partial + row[:, None] * stride_shared_partial
                shared_factor = shared_b + pair * stride_pair + element_of(out_offsets, slice_index, SLICES)
                d = piece(vectors, field(entry, D))
                for r_start in range(0, ranks, LONG_BLOCK_R):
                    r = r_start + tl.arange(0, LONG_BLOCK_R)
                    h = sum_splits(shared_row, row_mask, r, ranks, wide_tokens * stride_shared_partial, SPLITS)
                    h *= tl.load(d + r, mask=r < ranks, other=0.0)[None, :]
                    acc = dot_wide(h, _load_b(shared_factor, stride_shared, r, ranks, column, column_mask), acc)
                acc *= tl.load(piece(vectors, field(entry, E)) + column, mask=column_mask, other=0.0)[None, :]
            for r_start in range(0, rank, LONG_BLOCK_R):
                r = r_start + tl.arange(0, LONG_BLOCK_R)
                h = sum_splits(h_row, row_mask, r, rank, stride_split, SPLITS)
                acc = dot_wide(h, _load_b(factor, width, r, rank, column, column_mask), acc)
            _finish(y_row, row_mask, y_block, acc, scale, shift, flags, column, last)


@triton.jit
def _expand_plain(
    y_row,
    h_row,
    factor,
    scale,
    shift,
    count,
    rank,
    flags,
    offset,
    last,
    width,
    stride_split,
    SPLITS: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A slot without a shared term, of at most BLOCK_R ranks: all of h at once, before the columns."""
    lane = tl.arange(0, HEIGHT)
    row_mask = lane < count
    r = tl.arange(0, BLOCK_R)
    h = sum_splits(h_row, lane < tl.where(rank > 0, count, 0), r, rank, stride_split, SPLITS)
    for at in tl.range(offset, last, BLOCK_N, num_stages=STAGES):
        column = at + tl.arange(0, BLOCK_N)
        column_mask = column < last
        y_block = tl.load(y_row + column[None, :], mask=row_mask[:, None] & column_mask[None, :], other=0.0)
        b_block = _load_b(factor, width, r, rank, column, column_mask)
        acc = dot_wide(h, b_block, tl.zeros((HEIGHT, BLOCK_N), dtype=tl.float32))
        _finish(y_row, row_mask, y_block, acc, scale, shift, flags, column, last)


@triton.jit
def _finish(y_row, row_mask, y_block, acc, scale, shift, flags, column, last):
    """y s + b + acc, rounded once."""
    scaled, shifted = tl.where((flags & HAS_SCALE) != 0, last, 0), tl.where((flags & HAS_SHIFT) != 0, last, 0)
    s = tl.load(scale + column, mask=column < scaled, other=1.0)
    b = tl.load(shift + column, mask=column < shifted, other=0.0)
    total = y_block.to(tl.float32) * s[None, :] + b[None, :] + acc
    tl.store(y_row + column[None, :], total.to(y_block.dtype), mask=row_mask[:, None] & (column < last)[None, :])


@triton.jit
def _load_b(factor, stride, r, rank, column, column_mask):
    """B [r, column] of a factor that is stored rank-major."""
    at = factor + r[:, None].to(tl.int64) * stride + column[None, :]
    return tl.load(at, mask=(r < rank)[:, None] & column_mask[None, :], other=0.0)

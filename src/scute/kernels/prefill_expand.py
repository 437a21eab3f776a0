"""The expand of a prefill batch: matrix units on tiles of 32 rows."""

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


@triton.jit(do_not_specialize=["tokens", "own_programs"])
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
    shared_tiles,
    rows,
    shared_rows,
    slot_of_row,
    starts,
    out_offsets,
    tokens,
    own_programs,
    own_blocks,
    shared_blocks,
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
    BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    SHARED_BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = y s + b + h B + ((h_shared d) B_shared) e. Grid: (tile, block of columns) of slots, then of shared pairs.

    Programs that run together have neighbouring columns, so that what they read lies together in memory. A row is
    written by its slot's tile, except where all it has on a slice is the shared term: then by its pair's.
    """
    program = tl.program_id(0)
    if SHARED and program >= own_programs:
        program -= own_programs
        _expand_pair(
            y, shared_partial, vectors, table, shared_b, pair_rank, shared_tiles, shared_rows, slot_of_row,
            starts, out_offsets, program // shared_blocks, program % shared_blocks, tokens,
            stride_shared_partial, stride_y, stride_slot, stride_pair, stride_shared,
            SLICES, SPLITS, ALIGNED, HEIGHT, SHARED_BLOCK_R, BLOCK_N, PDL,
        )  # fmt: skip
    else:
        _expand_slot(
            y, partial, shared_partial, factors, vectors, table, shared_b, pair_rank, tiles, rows,
            starts, out_offsets, program // own_blocks, program % own_blocks, tokens,
            stride_partial, stride_shared_partial, stride_y, stride_slot, stride_pair, stride_shared,
            SLICES, SPLITS, SHARED, ALIGNED, HEIGHT, BLOCK_R, BLOCK_N, STEPS, STAGES, PDL,
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
    BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    slot = tl.load(tiles + tile * 3)
    first = tl.load(tiles + tile * 3 + 1)
    count = tl.load(tiles + tile * 3 + 2)
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
    is_plain = rank <= BLOCK_R
    if SHARED:
        is_plain = is_plain & ((flags & HAS_SHARED) == 0)
    if is_plain:  # all of h at once, before the columns
        r = tl.arange(0, BLOCK_R)
        h = sum_splits(h_row, tl.arange(0, HEIGHT) < tl.where(rank > 0, count, 0), r, rank, stride_split, SPLITS)
        for at in tl.range(offset, last, BLOCK_N, num_stages=STAGES):
            column = at + tl.arange(0, BLOCK_N)
            column_mask = column < last
            y_block = tl.load(y_row + column[None, :], mask=row_mask[:, None] & column_mask[None, :], other=0.0)
            b_block = _load_b(factor, width, r, rank, column, column_mask)
            acc = dot_wide(h, b_block, tl.zeros((HEIGHT, BLOCK_N), dtype=tl.float32))
            _finish(y_row, row_mask, y_block, acc, scale, shift, flags, column, last)
    else:
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
                for r_start in range(0, ranks, BLOCK_R):
                    r = r_start + tl.arange(0, BLOCK_R)
                    h = sum_splits(shared_row, row_mask, r, ranks, wide_tokens * stride_shared_partial, SPLITS)
                    h *= tl.load(d + r, mask=r < ranks, other=0.0)[None, :]
                    acc = dot_wide(h, _load_b(shared_factor, stride_shared, r, ranks, column, column_mask), acc)
                acc *= tl.load(piece(vectors, field(entry, E)) + column, mask=column_mask, other=0.0)[None, :]
            for r_start in range(0, rank, BLOCK_R):
                r = r_start + tl.arange(0, BLOCK_R)
                h = sum_splits(h_row, row_mask, r, rank, stride_split, SPLITS)
                acc = dot_wide(h, _load_b(factor, width, r, rank, column, column_mask), acc)
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


@triton.jit
def _expand_pair(
    y,
    shared_partial,
    vectors,
    table,
    shared_b,
    pair_rank,
    tiles,
    rows,
    slot_of_row,
    starts,
    out_offsets,
    tile,
    block,
    tokens,
    stride_shared_partial,
    stride_y,
    stride_slot,
    stride_pair,
    stride_shared,
    SLICES: tl.constexpr,
    SPLITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of one shared pair: the rows of all its adapters, d and e of each row's own."""
    pair = tl.load(tiles + tile * 3).to(tl.int64)
    first = tl.load(tiles + tile * 3 + 1)
    count = tl.load(tiles + tile * 3 + 2)
    if count == 0:
        return
    slice_index, start, end, offset = slice_of(block, starts, BLOCK_N, SLICES)
    is_row = tl.arange(0, HEIGHT) < count
    row = tl.load(rows + first + tl.arange(0, HEIGHT), mask=is_row, other=0).to(tl.int64)
    slot = tl.load(slot_of_row + row, mask=is_row, other=0)
    entry = entry_of(table, slot, slice_index, stride_slot)
    flags = tl.load(entry + FLAGS, mask=is_row, other=0)
    own_rank = tl.load(entry + RANK, mask=is_row, other=0)
    # A tile mixes the adapters of its pair: some have no term on this slice, some more than this term.
    row_mask = ((flags & (HAS_SHARED | HAS_SCALE | HAS_SHIFT)) == HAS_SHARED) & (own_rank == 0)
    d_unit = tl.load(entry + D, mask=row_mask, other=0)
    e_unit = tl.load(entry + E, mask=row_mask, other=0)
    rank = tl.load(pair_rank + pair)
    width = end - start
    out_offset = element_of(out_offsets, slice_index, SLICES)
    if ALIGNED:
        start = tl.multiple_of(start, 16)
        width = tl.multiple_of(width, 16)
        out_offset = tl.multiple_of(out_offset, 16)
    column = offset + tl.arange(0, BLOCK_N)
    column_mask = column < width
    mask = row_mask[:, None] & column_mask[None, :]
    factor = shared_b + pair * stride_pair + out_offset
    h_row = shared_partial + row[:, None] * stride_shared_partial
    d_row = piece(vectors, d_unit[:, None])
    y_at = y + row[:, None] * stride_y + (start + column)[None, :]
    if PDL:
        gdc_wait()
    y_block = tl.load(y_at, mask=mask, other=0.0)
    acc = tl.zeros((HEIGHT, BLOCK_N), dtype=tl.float32)
    for r_start in range(0, rank, BLOCK_R):
        r = r_start + tl.arange(0, BLOCK_R)
        h = sum_splits(h_row, row_mask, r, rank, tokens.to(tl.int64) * stride_shared_partial, SPLITS)
        h *= tl.load(d_row + r[None, :], mask=row_mask[:, None] & (r < rank)[None, :], other=0.0)
        acc = dot_wide(h, _load_b(factor, stride_shared, r, rank, column, column_mask), acc)
    acc *= tl.load(piece(vectors, e_unit[:, None]) + column[None, :], mask=mask, other=0.0)
    tl.store(y_at, (y_block.to(tl.float32) + acc).to(y_block.dtype), mask=mask)

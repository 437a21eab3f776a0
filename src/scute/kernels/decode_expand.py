"""The expand of a decode batch: plain multiplications on groups of four rows, as in the shrink."""

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
    is_used,
    piece,
    row_at,
    slice_of,
    sum_splits,
)
from scute.kernels.kernel import kernel


@kernel("tokens", "shared_programs", "shared_end")
def expand_rows(
    y,
    h,
    shared_h,
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
    shared_programs,
    shared_end,
    own_blocks,
    shared_blocks,
    stride_h,
    stride_shared_h,
    stride_y,
    stride_slot,
    stride_pair,
    stride_shared,
    SLICES: tl.constexpr,
    SHARED: tl.constexpr,
    ALIGNED: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARED_BLOCK_R: tl.constexpr,
    SHARED_BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = y s + b + h B + ((shared_h d) B_shared) e. Grid: (tile, block of columns), of the first tile of a pair, which
    takes longest, of slots, and of further tiles of pairs, which are often idle.

    Programs that run together have neighbouring columns, so that what they read lies together in memory. A row is
    written by its slot's tile, except where all it has on a slice is the shared term: then by its pair's.
    """
    program = tl.program_id(0)
    first = min(shared_blocks, shared_programs)
    own_programs = tl.num_programs(0) - shared_programs
    if program >= first and program < first + own_programs:
        program -= first
        _expand_slot(
            y, h, shared_h, factors, vectors, table, shared_b, pair_rank, tiles, rows,
            starts, out_offsets, program // own_blocks, program % own_blocks, tokens,
            stride_h, stride_shared_h, stride_y, stride_slot, stride_pair, stride_shared,
            SLICES, SHARED, ALIGNED, BLOCK_R, BLOCK_N, PDL,
        )  # fmt: skip
    elif SHARED:
        if program >= first:
            program -= own_programs
        tile = program // shared_blocks
        while is_used(shared_tiles, tile, shared_end, 3):
            _expand_pair(
                y, shared_h, vectors, table, shared_b, pair_rank, shared_tiles, shared_rows, slot_of_row,
                starts, out_offsets, tile, program % shared_blocks,
                stride_shared_h, stride_y, stride_slot, stride_pair, stride_shared,
                SLICES, ALIGNED, HEIGHT, SHARED_BLOCK_R, SHARED_BLOCK_N, PDL,
            )  # fmt: skip
            tile += shared_programs // shared_blocks
    # What follows waits for this launch alone, so it must not end before those before it.
    if PDL:
        gdc_wait()


@triton.jit
def _expand_slot(
    y,
    h,
    shared_h,
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
    stride_h,
    stride_shared_h,
    stride_y,
    stride_slot,
    stride_pair,
    stride_shared,
    SLICES: tl.constexpr,
    SHARED: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    slot = field(tiles + tile * 3, 0)
    first = field(tiles + tile * 3, 1)
    count = field(tiles + tile * 3, 2)
    if count == 0:
        return
    slice_index, start, end, offset = slice_of(block, starts, BLOCK_N, SLICES)
    entry = entry_of(table, slot, slice_index, stride_slot)
    rank = field(entry, RANK)
    flags = field(entry, FLAGS)
    b_unit = field(entry, B)
    scale_unit = field(entry, SCALE_AT)
    shift_unit = field(entry, SHIFT_AT)
    if (rank == 0) & ((flags & (HAS_SCALE | HAS_SHIFT)) == 0):
        return
    width = end - start
    if ALIGNED:
        start = tl.multiple_of(start, 16)
        width = tl.multiple_of(width, 16)
        offset = tl.multiple_of(offset, 16)
    column = offset + tl.arange(0, BLOCK_N)
    column_mask = column < width
    factor = piece(factors, b_unit)
    # Weights do not depend on the launch before: the first are loaded before waiting for it.
    weights = _load_b(factor + column, width, 0, rank, column, width, BLOCK_R)
    scaled, shifted = tl.where((flags & HAS_SCALE) != 0, width, 0), tl.where((flags & HAS_SHIFT) != 0, width, 0)
    s = tl.load(piece(vectors, scale_unit) + column, mask=column < scaled, other=1.0)
    b = tl.load(piece(vectors, shift_unit) + column, mask=column < shifted, other=0.0)
    if PDL:
        gdc_wait()
    h += slice_index * tokens.to(tl.int64) * stride_h
    for group in range(0, count, 4):
        row0, live0 = row_at(rows + first, group, count)
        row1, live1 = row_at(rows + first, group + 1, count)
        row2, live2 = row_at(rows + first, group + 2, count)
        row3, live3 = row_at(rows + first, group + 3, count)
        y_at = y + start + column
        y0 = tl.load(y_at + row0 * stride_y, mask=column < tl.where(live0, width, 0), other=0.0)
        y1 = tl.load(y_at + row1 * stride_y, mask=column < tl.where(live1, width, 0), other=0.0)
        y2 = tl.load(y_at + row2 * stride_y, mask=column < tl.where(live2, width, 0), other=0.0)
        y3 = tl.load(y_at + row3 * stride_y, mask=column < tl.where(live3, width, 0), other=0.0)
        acc0 = tl.zeros((BLOCK_N,), dtype=tl.float32)
        acc1 = tl.zeros((BLOCK_N,), dtype=tl.float32)
        acc2 = tl.zeros((BLOCK_N,), dtype=tl.float32)
        acc3 = tl.zeros((BLOCK_N,), dtype=tl.float32)
        if SHARED and (flags & HAS_SHARED) != 0:
            pair = field(entry, PAIR).to(tl.int64)
            shared_factor = shared_b + pair * stride_pair + element_of(out_offsets, slice_index, SLICES) + column
            d = piece(vectors, field(entry, D))
            ranks = tl.load(pair_rank + pair)
            for r in range(0, ranks):
                term = tl.load(shared_factor + r * stride_shared, mask=column_mask, other=0.0).to(tl.float32)
                term *= tl.load(d + r)
                acc0 += tl.load(shared_h + row0 * stride_shared_h + r) * term
                acc1 += tl.load(shared_h + row1 * stride_shared_h + r) * term
                acc2 += tl.load(shared_h + row2 * stride_shared_h + r) * term
                acc3 += tl.load(shared_h + row3 * stride_shared_h + r) * term
            e = tl.load(piece(vectors, field(entry, E)) + column, mask=column_mask, other=0.0)
            acc0 *= e
            acc1 *= e
            acc2 *= e
            acc3 *= e
        h0, h1, h2, h3 = h + row0 * stride_h, h + row1 * stride_h, h + row2 * stride_h, h + row3 * stride_h
        acc0, acc1, acc2, acc3 = _add_product(acc0, acc1, acc2, acc3, h0, h1, h2, h3, 0, rank, weights, BLOCK_R)
        for r_start in range(BLOCK_R, rank, BLOCK_R):
            more = _load_b(factor + column, width, r_start, rank, column, width, BLOCK_R)
            acc0, acc1, acc2, acc3 = _add_product(acc0, acc1, acc2, acc3, h0, h1, h2, h3, r_start, rank, more, BLOCK_R)
        dtype: tl.constexpr = y.dtype.element_ty
        y0 = (y0.to(tl.float32) * s + b + acc0).to(dtype)
        y1 = (y1.to(tl.float32) * s + b + acc1).to(dtype)
        y2 = (y2.to(tl.float32) * s + b + acc2).to(dtype)
        y3 = (y3.to(tl.float32) * s + b + acc3).to(dtype)
        tl.store(y_at + row0 * stride_y, y0, mask=column < tl.where(live0, width, 0))
        tl.store(y_at + row1 * stride_y, y1, mask=column < tl.where(live1, width, 0))
        tl.store(y_at + row2 * stride_y, y2, mask=column < tl.where(live2, width, 0))
        tl.store(y_at + row3 * stride_y, y3, mask=column < tl.where(live3, width, 0))


@triton.jit
def _load_b(b_columns, stride, r_start, rank, column, width, BLOCK_R: tl.constexpr):
    """BLOCK_R rows of a factor that is stored rank-major, as a tuple, so that all are on their way at once."""
    rows = (tl.load(b_columns + r_start * stride, mask=column < tl.where(r_start < rank, width, 0), other=0.0),)
    for i in tl.static_range(1, BLOCK_R):
        r = r_start + i
        row = tl.load(b_columns + r * stride, mask=column < tl.where(r < rank, width, 0), other=0.0)
        rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005 - Triton has no unpacking
    return rows


@triton.jit
def _add_product(acc0, acc1, acc2, acc3, h0, h1, h2, h3, r_start, rank, weights, BLOCK_R: tl.constexpr):
    """Add four rows of h times a block of B; a row that does not exist is row 0 again, and its result is dropped."""
    for i in tl.static_range(BLOCK_R):
        r = r_start + i
        has_rank = r < rank
        term = weights[i].to(tl.float32)
        acc0 += tl.load(h0 + r, mask=has_rank, other=0.0) * term
        acc1 += tl.load(h1 + r, mask=has_rank, other=0.0) * term
        acc2 += tl.load(h2 + r, mask=has_rank, other=0.0) * term
        acc3 += tl.load(h3 + r, mask=has_rank, other=0.0) * term
    return acc0, acc1, acc2, acc3


@triton.jit
def _expand_pair(
    y,
    shared_h,
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
    stride_h,
    stride_y,
    stride_slot,
    stride_pair,
    stride_shared,
    SLICES: tl.constexpr,
    ALIGNED: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Matrix units again, for the rows of all adapters of a pair; e is each row's own."""
    pair = field(tiles + tile * 3, 0).to(tl.int64)
    first = field(tiles + tile * 3, 1)
    count = field(tiles + tile * 3, 2)
    slice_index, start, end, offset = slice_of(block, starts, BLOCK_N, SLICES)
    rank = tl.load(pair_rank + pair)
    width = end - start
    out_offset = element_of(out_offsets, slice_index, SLICES)
    if ALIGNED:
        start = tl.multiple_of(start, 16)
        width = tl.multiple_of(width, 16)
        out_offset = tl.multiple_of(out_offset, 16)
    column = offset + tl.arange(0, BLOCK_N)
    column_mask = column < width
    factor = shared_b + pair * stride_pair + out_offset + column[None, :]
    r = tl.arange(0, BLOCK_R)
    weights = tl.load(
        factor + r[:, None].to(tl.int64) * stride_shared, mask=(r < rank)[:, None] & column_mask[None, :], other=0.0
    )
    lane = tl.arange(0, HEIGHT)
    row = tl.load(rows + first + lane, mask=lane < count, other=0, eviction_policy="evict_last").to(tl.int64)
    slot = tl.load(slot_of_row + row, mask=lane < count, other=0, eviction_policy="evict_last")
    entry = entry_of(table, slot, slice_index, stride_slot)
    flags = tl.load(entry + FLAGS, mask=lane < count, other=0, eviction_policy="evict_last")
    own_rank = tl.load(entry + RANK, mask=lane < count, other=0, eviction_policy="evict_last")
    d_unit = tl.load(entry + D, mask=lane < count, other=0, eviction_policy="evict_last")
    e_unit = tl.load(entry + E, mask=lane < count, other=0, eviction_policy="evict_last")
    # A tile mixes the adapters of its pair: some have no term on this slice, some more than this term.
    row_mask = ((flags & (HAS_SHARED | HAS_SCALE | HAS_SHIFT)) == HAS_SHARED) & (own_rank == 0)
    mask = row_mask[:, None] & column_mask[None, :]
    e = tl.load(piece(vectors, e_unit[:, None]) + column[None, :], mask=mask, other=0.0)
    y_at = y + row[:, None] * stride_y + (start + column)[None, :]
    d_row = piece(vectors, d_unit[:, None])
    d = tl.load(d_row + r[None, :], mask=row_mask[:, None] & (r < rank)[None, :], other=0.0)
    h_row = shared_h + row[:, None] * stride_h
    if PDL:
        gdc_wait()
    y_block = tl.load(y_at, mask=mask, other=0.0)
    acc = tl.zeros((HEIGHT, BLOCK_N), dtype=tl.float32)
    for r_start in range(0, rank, BLOCK_R):
        at = r_start + r
        if r_start > 0:
            weights = tl.load(
                factor + at[:, None].to(tl.int64) * stride_shared,
                mask=(at < rank)[:, None] & column_mask[None, :],
                other=0.0,
            )
            d = tl.load(d_row + at[None, :], mask=row_mask[:, None] & (at < rank)[None, :], other=0.0)
        values = sum_splits(h_row, row_mask, at, rank, 0, 1)
        acc = dot_wide(values * d, weights, acc)
    tl.store(y_at, (y_block.to(tl.float32) + acc * e).to(y.dtype.element_ty), mask=mask)

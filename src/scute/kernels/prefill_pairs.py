"""The expand of a prefill batch for shared pairs, whose ranks are many: a GEMM on tiles of 64 rows of all adapters.

What it multiplies is made by a launch of its own, once for all columns: h d, as two 16-bit parts.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from scute.kernels.device import (
    FLAGS,
    HAS_SCALE,
    HAS_SHARED,
    HAS_SHIFT,
    RANK,
    D,
    E,
    element_of,
    entry_of,
    field,
    piece,
    slice_of,
    sum_splits,
)
from scute.kernels.kernel import kernel


@triton.jit
def _only_shared(entry, is_row):
    """Rows of a tile of entries that have the shared term on the slice and no other."""
    flags = tl.load(entry + FLAGS, mask=is_row, other=0)
    own_rank = tl.load(entry + RANK, mask=is_row, other=0)
    return ((flags & (HAS_SHARED | HAS_SCALE | HAS_SHIFT)) == HAS_SHARED) & (own_rank == 0)


@kernel("tokens")
def finish_pair_shrink(
    out,
    shared_partial,
    vectors,
    table,
    pair_rank,
    shared_tiles,
    shared_rows,
    slot_of_row,
    tokens,
    rank_blocks,
    stride_partial,
    stride_slot,
    SLICES: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[slice, position, part] = h_shared d, d of each row's own, 0 past the rank; grid (tile, block of ranks).

    position: in `shared_rows`. Part 0 is the product in the dtype of `out`; part 1, if there is one, the remainder.
    """
    if PDL:
        gdc_launch_dependents()
    tile = shared_tiles + tl.program_id(0) // rank_blocks * 3
    pair = field(tile, 0).to(tl.int64)
    first = field(tile, 1)
    count = field(tile, 2)
    r = tl.program_id(0) % rank_blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    if count > 0:
        is_row = tl.arange(0, HEIGHT) < count
        position = first + tl.arange(0, HEIGHT)
        row = tl.load(shared_rows + position, mask=is_row, other=0).to(tl.int64)
        slot = tl.load(slot_of_row + row, mask=is_row, other=0)
        rank = tl.load(pair_rank + pair)
        stride_split = tokens.to(tl.int64) * stride_partial
        if PDL:
            gdc_wait()
        h = sum_splits(shared_partial + row[:, None] * stride_partial, is_row, r, rank, stride_split, SPLITS)
        for slice_index in tl.static_range(SLICES):
            entry = entry_of(table, slot, slice_index, stride_slot)
            unit = tl.load(entry + D, mask=_only_shared(entry, is_row), other=0)
            mask = (is_row & (unit > 0))[:, None] & (r < rank)[None, :]
            product = h * tl.load(piece(vectors, unit[:, None]) + r[None, :], mask=mask, other=0.0)
            high = product.to(out.dtype.element_ty)
            at = out + (slice_index * tokens.to(tl.int64) + position[:, None]) * (PARTS * stride_partial) + r[None, :]
            tl.store(at, high, mask=is_row[:, None])
            if PARTS > 1:
                low = (product - high.to(tl.float32)).to(high.dtype)
                tl.store(at + stride_partial, low, mask=is_row[:, None])
    # What follows waits for this launch alone, so it must not end before those before it.
    if PDL:
        gdc_wait()


@kernel("tokens")
def expand_pair_tiles(
    y,
    products,
    vectors,
    table,
    shared_b,
    pair_rank,
    shared_tiles,
    shared_rows,
    slot_of_row,
    starts,
    out_offsets,
    tokens,
    blocks,
    stride_part,
    stride_y,
    stride_slot,
    stride_pair,
    stride_shared,
    SLICES: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    HEIGHT: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """y += (products B_shared) e, as `finish_pair_shrink` made them; grid (tile, STEPS blocks of columns).

    RANKS: of all pairs, where a tile's products stay on the chip over all columns; 0 where there are too many.
    Rows that have more than this term on a slice are left to `expand_tiles` there.
    """
    tile = shared_tiles + tl.program_id(0) // blocks * 3
    pair = field(tile, 0).to(tl.int64)
    first = field(tile, 1)
    count = field(tile, 2)
    if count > 0:
        slice_index, start, end, offset = slice_of(tl.program_id(0) % blocks, starts, STEPS * BLOCK_N, SLICES)
        is_row = tl.arange(0, HEIGHT) < count
        position = first + tl.arange(0, HEIGHT)
        row = tl.load(shared_rows + position, mask=is_row, other=0).to(tl.int64)
        slot = tl.load(slot_of_row + row, mask=is_row, other=0)
        entry = entry_of(table, slot, slice_index, stride_slot)
        row_mask = is_row & _only_shared(entry, is_row)
        e_row = piece(vectors, tl.load(entry + E, mask=row_mask, other=0)[:, None])
        rank = tl.load(pair_rank + pair)
        width = end - start
        out_offset = element_of(out_offsets, slice_index, SLICES)
        if ALIGNED:
            start = tl.multiple_of(start, 16)
            width = tl.multiple_of(width, 16)
            out_offset = tl.multiple_of(out_offset, 16)
        last = min(offset + STEPS * BLOCK_N, width)
        factor = shared_b + pair * stride_pair + out_offset
        y_row = y + row[:, None] * stride_y + start
        product_row = products + (slice_index * tokens.to(tl.int64) + position[:, None]) * (PARTS * stride_part)
        if PDL:
            gdc_wait()
        if RANKS > 0:
            r = tl.arange(0, RANKS)
            r_mask = is_row[:, None] & (r < stride_part)[None, :]
            high = tl.load(product_row + r[None, :], mask=r_mask, other=0.0)  # 0 past the rank
            if PARTS > 1:
                low = tl.load(product_row + stride_part + r[None, :], mask=r_mask, other=0.0)
            for at in tl.range(offset, last, BLOCK_N, num_stages=STAGES):
                column = at + tl.arange(0, BLOCK_N)
                b_block = _load_b(factor, stride_shared, r, rank, column, last)
                mask = row_mask[:, None] & (column < last)[None, :]
                y_block = tl.load(y_row + column[None, :], mask=mask, other=0.0)
                acc = tl.dot(high, b_block, input_precision="ieee")
                if PARTS > 1:
                    acc = tl.dot(low, b_block, acc, input_precision="ieee")
                _finish(y_row, e_row, y_block, acc, column, mask)
        else:
            for at in range(offset, last, BLOCK_N):
                column = at + tl.arange(0, BLOCK_N)
                acc = tl.zeros((HEIGHT, BLOCK_N), dtype=tl.float32)
                for r_start in tl.range(0, rank, BLOCK_R, num_stages=STAGES):
                    r = r_start + tl.arange(0, BLOCK_R)
                    b_block = _load_b(factor, stride_shared, r, rank, column, last)
                    for part in tl.static_range(PARTS):
                        product = tl.load(
                            product_row + part * stride_part + r[None, :], mask=is_row[:, None], other=0.0
                        )
                        acc = tl.dot(product, b_block, acc, input_precision="ieee")
                mask = row_mask[:, None] & (column < last)[None, :]
                y_block = tl.load(y_row + column[None, :], mask=mask, other=0.0)
                _finish(y_row, e_row, y_block, acc, column, mask)
    # What follows waits for this launch alone, so it must not end before those before it.
    if PDL:
        gdc_wait()


@triton.jit
def _load_b(factor, stride, r, rank, column, last):
    """B_shared [r, column]."""
    at = factor + r[:, None].to(tl.int64) * stride + column[None, :]
    return tl.load(at, mask=(r < rank)[:, None] & (column < last)[None, :], other=0.0)


@triton.jit
def _finish(y_row, e_row, y_block, acc, column, mask):
    """y + acc e, rounded once."""
    acc *= tl.load(e_row + column[None, :], mask=mask, other=0.0)
    tl.store(y_row + column[None, :], (y_block.to(tl.float32) + acc).to(y_block.dtype), mask=mask)

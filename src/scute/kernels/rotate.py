"""The rotation pass: x R for the rows of adapters that rotate their input (paper, section 4.1)."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from scute.kernels.device import ROTATION, WIDTH, entry_of, field, is_used, piece
from scute.kernels.kernel import kernel


@kernel("slice_index")
def rotate(
    out,
    x,
    factors,
    table,
    tiles,
    rows,
    slice_index,
    in_features,
    stride_x,
    stride_slot,
    HEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDEST: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[row] = x R of one slice, for the rows of slots that rotate any; grid (COLUMNS columns, tile).

    A slot that does not rotate the slice gets x[row]. Other rows are left alone.
    """
    if PDL:
        gdc_launch_dependents()
    rotate_tile(
        out, x, factors, table, tiles + tl.program_id(1) * 3, rows, slice_index, tl.program_id(0) * COLUMNS,
        in_features, stride_x, stride_slot, HEIGHT, BLOCK, COLUMNS, WIDEST, PDL,
    )  # fmt: skip
    # What follows waits for this launch alone, so it must not end before those before it.
    if PDL:
        gdc_wait()


@kernel("tokens", "tiles_at_once", "tiles_end")
def copy_and_rotate(
    out,
    x,
    factors,
    table,
    rotated_tiles,
    rows,
    slot_of_row,
    tokens,
    tiles_at_once,
    tiles_end,
    in_features,
    stride_x,
    stride_slot,
    HEIGHT: tl.constexpr,
    COPY_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDEST: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[i] = x R of slice i, or x where a row's slot does not rotate it.

    Grid: (columns, part, i). Parts below `tiles_at_once` go through the tiles of rotating slots, the others copy rows.
    What follows may start when x is there, not before: see `fused_gemm`.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    out += tl.program_id(2).to(tl.int64) * tokens * in_features
    part = tl.program_id(1)
    if part < tiles_at_once:
        while is_used(rotated_tiles, part, tiles_end, 3):
            rotate_tile(
                out, x, factors, table, rotated_tiles + part * 3, rows, tl.program_id(2), tl.program_id(0) * COLUMNS,
                in_features, stride_x, stride_slot, HEIGHT, BLOCK, COLUMNS, WIDEST, False,
            )  # fmt: skip
            part += tiles_at_once
    else:
        copy_rows(
            out, x, table, slot_of_row, (part - tiles_at_once) * COPY_ROWS, tl.program_id(2),
            tl.program_id(0) * COLUMNS, tokens, in_features, stride_x, stride_slot, COPY_ROWS, COLUMNS, False,
        )  # fmt: skip


@triton.jit
def copy_rows(
    out,
    x,
    table,
    slot_of_row,
    first_row,
    slice_index,
    first_column,
    tokens,
    in_features,
    stride_x,
    stride_slot,
    COPY_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Skips the rows of slots that rotate the slice, so every element is written once."""
    row = first_row + tl.arange(0, COPY_ROWS)
    row_mask = row < tokens
    slot = tl.load(slot_of_row + row, mask=row_mask, other=-1, eviction_policy="evict_last")
    entry = entry_of(table, slot, slice_index, stride_slot)
    width = tl.load(entry + WIDTH, mask=slot >= 0, other=0, eviction_policy="evict_last")
    column = first_column + tl.arange(0, COLUMNS)
    exists = row_mask[:, None] & (column < in_features)[None, :]
    row = row.to(tl.int64)[:, None]
    if PDL:
        gdc_wait()
    values = tl.load(x + row * stride_x + column[None, :], mask=exists, other=0.0)
    tl.store(out + row * in_features + column[None, :], values, mask=exists & (width == 0)[:, None])


@triton.jit
def rotate_tile(
    out,
    x,
    factors,
    table,
    tile,
    rows,
    slice_index,
    columns_start,
    in_features,
    stride_x,
    stride_slot,
    HEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDEST: tl.constexpr,
    PDL: tl.constexpr,
):
    """x + x D for one tile of a slot.

    WIDEST: the engine's widest rotation block where that is a size of matrix units and divides COLUMNS, else 0. Blocks
    of this width are multiplied one by one; of others, a block of columns multiplies the columns of x that its rotation
    blocks reach, so the width need not divide BLOCK nor the other way round.
    """
    slot = field(tile, 0)
    first = field(tile, 1)
    count = field(tile, 2)
    if count > 0:
        entry = entry_of(table, slot, slice_index, stride_slot)
        w = field(entry, WIDTH)
        rotation = piece(factors, field(entry, ROTATION))
        lane = tl.arange(0, HEIGHT)
        row_mask = lane < count
        row = tl.load(rows + first + lane, mask=row_mask, other=0).to(tl.int64)
        if w == 0:
            column = columns_start + tl.arange(0, COLUMNS)
            mask = row_mask[:, None] & (column < in_features)[None, :]
            if PDL:
                gdc_wait()
            values = tl.load(x + row[:, None] * stride_x + column[None, :], mask=mask, other=0.0)
            tl.store(out + row[:, None] * in_features + column[None, :], values, mask=mask)
        elif WIDEST > 0 and w == WIDEST:
            _rotate_units(
                out, x, rotation, row, row_mask, columns_start, in_features, stride_x, COLUMNS, WIDEST, PDL
            )  # fmt: skip
        else:
            _rotate_columns(
                out, x, rotation, w, row, row_mask, columns_start, in_features, stride_x, HEIGHT, BLOCK, COLUMNS, PDL
            )  # fmt: skip


@triton.jit
def _rotate_units(
    out,
    x,
    rotation,
    row,
    row_mask,
    columns_start,
    in_features,
    stride_x,
    COLUMNS: tl.constexpr,
    WIDTH_OF_UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Blocks that are as wide as a matrix unit, one by one."""
    block = tl.arange(0, COLUMNS // WIDTH_OF_UNIT)[:, None, None]
    i, j = tl.arange(0, WIDTH_OF_UNIT)[None, :, None], tl.arange(0, WIDTH_OF_UNIT)[None, None, :]
    n = columns_start // WIDTH_OF_UNIT + block
    d_blocks = tl.load(
        rotation + n.to(tl.int64) * (WIDTH_OF_UNIT * WIDTH_OF_UNIT) + i * WIDTH_OF_UNIT + j,
        mask=n * WIDTH_OF_UNIT < in_features,
        other=0.0,
    )
    at = columns_start + block * WIDTH_OF_UNIT + j
    rows_at = row[None, :, None]
    mask = row_mask[None, :, None] & (at < in_features)
    if PDL:
        gdc_wait()
    x_blocks = tl.load(x + rows_at * stride_x + at, mask=mask, other=0.0)
    total = x_blocks.to(tl.float32) + tl.dot(x_blocks, d_blocks, input_precision="ieee")
    tl.store(out + rows_at * in_features + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rotate_columns(
    out,
    x,
    rotation,
    w,
    row,
    row_mask,
    columns_start,
    in_features,
    stride_x,
    HEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Blocks of any width w, BLOCK columns at a time: elements of D outside the blocks count as zero."""
    x_row = x + row[:, None] * stride_x
    out_row = out + row[:, None] * in_features
    if PDL:
        gdc_wait()
    for first_column in range(columns_start, min(columns_start + COLUMNS, in_features), BLOCK):
        column = first_column + tl.arange(0, BLOCK)
        column_mask = column < in_features
        last_column = min(first_column + BLOCK, in_features) - 1
        # Rounded down to 16, which the compiler can see, so that loads of x are vectorised.
        reach_start = first_column // w * w // 16 * 16
        reach_end = (last_column // w + 1) * w
        acc = tl.zeros((HEIGHT, BLOCK), dtype=tl.float32)
        for start in range(reach_start, reach_end, BLOCK):
            k = start + tl.arange(0, BLOCK)
            k_mask = k < in_features
            x_block = tl.load(x_row + k[None, :], mask=row_mask[:, None] & k_mask[None, :], other=0.0)
            same_block = (k // w)[:, None] == (column // w)[None, :]
            d_block = tl.load(
                rotation + k[:, None].to(tl.int64) * w + (column % w)[None, :],
                mask=same_block & k_mask[:, None] & column_mask[None, :],
                other=0.0,
            )
            acc = tl.dot(x_block, d_block, acc, input_precision="ieee")
        mask = row_mask[:, None] & column_mask[None, :]
        total = tl.load(x_row + column[None, :], mask=mask, other=0.0).to(tl.float32) + acc
        tl.store(out_row + column[None, :], total.to(out.dtype.element_ty), mask=mask)

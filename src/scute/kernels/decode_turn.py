"""Rotation and shrink of a decode batch in one launch, before the base GEMM: both need x, neither needs the other."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from scute.kernels.decode_shrink import shrink_program
from scute.kernels.device import is_used
from scute.kernels.kernel import kernel
from scute.kernels.rotate import copy_rows, rotate_tile


@kernel("tokens", "tiles_end", "items_launched", "items_end", "pairs_launched", "pairs_end", "items_first", "turning")
def turn_and_shrink(
    out,
    x,
    factors,
    table,
    shared_a,
    pair_rank,
    rotated_tiles,
    items,
    shared_tiles,
    rows,
    shared_rows,
    slot_of_row,
    h,
    shared_h,
    shared_partial,
    arrivals,
    tokens,
    tiles_end,
    items_launched,
    items_end,
    pairs_launched,
    pairs_end,
    items_first,
    turning,
    column_blocks,
    in_features,
    stride_h,
    stride_shared_h,
    stride_x,
    stride_slot,
    stride_pair,
    stride_shared,
    SLICES: tl.constexpr,
    PARTS: tl.constexpr,
    SHARED_CHUNKS: tl.constexpr,
    SHARED_SPLITS: tl.constexpr,
    SHARED_BLOCK_K: tl.constexpr,
    HEIGHT: tl.constexpr,
    CHUNK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    COPY_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDEST: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[slice] = x R, or x where a row's slot does not rotate the slice; h as `shrink_rows` writes it.

    Grid: the shrink's programs for the first tile of a pair and the first items, which take longest; then for every
    slice TILES programs for the tiles of rotating slots, and after those groups of rows to copy, columns fastest; then
    the rest of the shrink's. Programs look for more tiles, as in the shrink.
    """
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    early = SHARED_CHUNKS * SHARED_SPLITS + items_first * (PARTS * SLICES)
    if program < early or program >= early + turning:
        shrink_program(
            tl.where(program < early, program, program - turning), x, factors, table, shared_a, pair_rank, items,
            shared_tiles, rows, shared_rows, h, shared_h, shared_partial, arrivals, tokens, items_launched, items_end,
            pairs_launched, pairs_end, in_features, stride_h, stride_shared_h, stride_x, stride_slot, stride_pair,
            stride_shared, SLICES, PARTS, SHARED_CHUNKS, SHARED_SPLITS, SHARED_BLOCK_K, HEIGHT, CHUNK, RANKS, BLOCK_K,
            ONE_BLOCK, PDL,
        )  # fmt: skip
    else:
        program -= early
        first_column = program % column_blocks * COLUMNS
        slice_index = program // column_blocks % SLICES
        part = program // (column_blocks * SLICES)
        out += slice_index.to(tl.int64) * tokens * in_features
        if part < TILES:
            while is_used(rotated_tiles, part, tiles_end, 3):
                rotate_tile(
                    out, x, factors, table, rotated_tiles + part * 3, rows, slice_index, first_column, in_features,
                    stride_x, stride_slot, HEIGHT, BLOCK, COLUMNS, WIDEST, PDL,
                )  # fmt: skip
                part += TILES
        else:
            copy_rows(
                out, x, table, slot_of_row, (part - TILES) * COPY_ROWS, slice_index, first_column, tokens,
                in_features, stride_x, stride_slot, COPY_ROWS, COLUMNS, PDL,
            )  # fmt: skip
    # What follows waits for this launch alone, so it must not end before those before it.
    if PDL:
        gdc_wait()

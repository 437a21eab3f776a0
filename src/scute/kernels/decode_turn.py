"""Rotation and shrink of a decode batch in one launch, before the base GEMM: both need x, neither needs the other."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from scute.kernels.decode_shrink import shrink_part
from scute.kernels.device import is_used
from scute.kernels.rotate import copy_rows, rotate_tile


@triton.jit(do_not_specialize=["tokens", "tiles_end", "items_launched", "items_end"])
def turn_and_shrink(
    out,
    x,
    factors,
    table,
    shared_a,
    pair_rank,
    rotated_tiles,
    items,
    rows,
    shared_rows,
    slot_of_row,
    h,
    shared_h,
    tokens,
    tiles_end,
    items_launched,
    items_end,
    parts,
    column_blocks,
    in_features,
    stride_h,
    stride_shared_h,
    stride_x,
    stride_slot,
    stride_pair,
    stride_shared,
    SLICES: tl.constexpr,
    SHARED: tl.constexpr,
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

    Grid: the shrink's items and parts, which take longest, for every slice; then for every slice TILES programs for the
    tiles of rotating slots, and after those groups of rows to copy, columns fastest. How many tiles and items there are
    is not known when a graph is captured: programs look for more.
    """
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    shrink_programs = parts * items_launched * SLICES
    if program < shrink_programs:
        item = program // parts % items_launched
        while is_used(items, item, items_end, 4):
            shrink_part(
                x, factors, table, shared_a, pair_rank, items + item * 4, rows, shared_rows,
                h, shared_h, program % parts, program // (parts * items_launched), tokens, in_features,
                stride_h, stride_shared_h, stride_x, stride_slot, stride_pair, stride_shared,
                SHARED, SHARED_SPLITS, SHARED_BLOCK_K, HEIGHT, CHUNK, RANKS, BLOCK_K, ONE_BLOCK, PDL,
            )  # fmt: skip
            item += items_launched
    else:
        program -= shrink_programs
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

"""Rotation and shrink of a decode batch in one launch, before the base GEMM: both need x, neither needs the other."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from scute.kernels.decode_shrink import shrink_part
from scute.kernels.rotate import rotate_part


@triton.jit(do_not_specialize=["tokens", "tiles_launched", "copies_end", "turn_programs", "items_launched"])
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
    tiles_launched,
    copies_end,
    turn_programs,
    items_launched,
    column_blocks,
    parts,
    in_features,
    stride_h,
    stride_shared_h,
    stride_x,
    stride_slot,
    stride_pair,
    stride_shared,
    SHARED: tl.constexpr,
    SHARED_SPLITS: tl.constexpr,
    SHARED_BLOCK_K: tl.constexpr,
    HEIGHT: tl.constexpr,
    CHUNK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDEST: tl.constexpr,
    PDL: tl.constexpr,
):
    """What `rotate` and `shrink_rows` do. Grid: the programs of the one, columns fastest, then those of the other."""
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    if program < turn_programs:
        slice_index = program // (column_blocks * copies_end)
        rotate_part(
            out, x, factors, table, rotated_tiles, rows, slot_of_row, program % column_blocks * COLUMNS,
            program // column_blocks % copies_end, slice_index, slice_index, tokens, tiles_launched, in_features,
            stride_x, stride_slot, HEIGHT, BLOCK, COLUMNS, WIDEST, PDL,
        )  # fmt: skip
    else:
        program -= turn_programs
        shrink_part(
            x, factors, table, shared_a, pair_rank, items + program // parts % items_launched * 4, rows, shared_rows,
            h, shared_h, program % parts, program // (parts * items_launched), tokens, in_features,
            stride_h, stride_shared_h, stride_x, stride_slot, stride_pair, stride_shared,
            SHARED, SHARED_SPLITS, SHARED_BLOCK_K, HEIGHT, CHUNK, RANKS, BLOCK_K, ONE_BLOCK, PDL,
        )  # fmt: skip
    # What follows waits for this launch alone, so it must not end before those before it.
    if PDL:
        gdc_wait()

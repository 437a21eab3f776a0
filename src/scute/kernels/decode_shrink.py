"""The shrink of a decode batch, where every adapter has few rows: all about reading its weights once, and soon.

Plain multiplications on the rows there are: a matrix unit works on sixteen rows, of which three or four would be real.
Rows go in groups of four, so that a weight in a register serves four of them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from scute.kernels.device import RANK, A, Number, entry_of, field, is_used, piece, row_at
from scute.kernels.kernel import kernel

LANES = Number(4)


@kernel("tokens", "items_launched", "items_end", "pairs_launched", "pairs_end")
def shrink_rows(
    x,
    factors,
    table,
    shared_a,
    pair_rank,
    items,
    shared_tiles,
    rows,
    shared_rows,
    h,
    shared_h,
    shared_partial,
    arrivals,
    tokens,
    items_launched,
    items_end,
    pairs_launched,
    pairs_end,
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
    BESIDE_GEMM: tl.constexpr,
    PDL: tl.constexpr,
):
    """The shrink alone; grid: `shrink_program`.

    BESIDE_GEMM: the launch before is `fused_gemm`, which lets this one start only when x is there. Nothing waits for it
    then but the end.
    """
    if PDL:
        gdc_launch_dependents()
    shrink_program(
        tl.program_id(0), x, factors, table, shared_a, pair_rank, items, shared_tiles, rows, shared_rows,
        h, shared_h, shared_partial, arrivals, tokens, items_launched, items_end, pairs_launched, pairs_end,
        in_features, stride_h, stride_shared_h, stride_x, stride_slot, stride_pair, stride_shared, SLICES, PARTS,
        SHARED_CHUNKS, SHARED_SPLITS, SHARED_BLOCK_K, HEIGHT, CHUNK, RANKS, BLOCK_K, ONE_BLOCK,
        PDL and not BESIDE_GEMM,
    )  # fmt: skip
    # The expand waits for this launch alone, so this one must not end before those before it.
    if PDL:
        gdc_wait()


@triton.jit
def shrink_program(
    program,
    x,
    factors,
    table,
    shared_a,
    pair_rank,
    items,
    shared_tiles,
    rows,
    shared_rows,
    h,
    shared_h,
    shared_partial,
    arrivals,
    tokens,
    items_launched,
    items_end,
    pairs_launched,
    pairs_end,
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
    PDL: tl.constexpr,
):
    """h[slice, row, :rank] = x[row] A^T of slots, and shared_h[row, :rank] of pairs, once for all slices.

    Programs: of the first tile of a pair, SHARED_CHUNKS chunks of ranks of SHARED_SPLITS splits of the columns; of
    slots, `items_launched` items of PARTS parts, which read RANKS ranks over all columns, for every slice; then of
    further tiles of pairs, `pairs_launched` in all. How many tiles and items there are is not known when a graph is
    captured: programs look for more, and those that are often idle come last. SHARED_CHUNKS is 0 where no row needs a
    pair.
    """
    tile_programs: tl.constexpr = SHARED_CHUNKS * SHARED_SPLITS
    slot_programs = items_launched * (PARTS * SLICES)
    if program >= tile_programs and program < tile_programs + slot_programs:
        program -= tile_programs
        part = program % PARTS
        slice_index = program // PARTS % SLICES
        item = program // (PARTS * SLICES)
        while is_used(items, item, items_end, 4):
            entry = entry_of(table, field(items + item * 4, 0), slice_index, stride_slot)
            _shrink_ranks(
                x, piece(factors, field(entry, A)), in_features, field(items + item * 4, 3) + part * RANKS,
                field(entry, RANK), rows + field(items + item * 4, 1), field(items + item * 4, 2),
                h + slice_index * tokens.to(tl.int64) * stride_h, stride_h, stride_x,
                RANKS, BLOCK_K, ONE_BLOCK, PDL,
            )  # fmt: skip
            item += items_launched
    elif SHARED_CHUNKS > 0:
        if program >= tile_programs:
            program -= slot_programs
        split = program % SHARED_SPLITS
        chunk = program // SHARED_SPLITS % SHARED_CHUNKS
        tile = program // tile_programs
        while is_used(shared_tiles, tile, pairs_end, 3):
            pair = field(shared_tiles + tile * 3, 0).to(tl.int64)
            rank = tl.load(pair_rank + pair)
            if chunk * CHUNK < rank:
                _shrink_pair(
                    x, shared_a + pair * stride_pair, stride_shared, chunk * CHUNK, rank,
                    shared_rows + field(shared_tiles + tile * 3, 1), field(shared_tiles + tile * 3, 2),
                    shared_h, shared_partial, stride_shared_h, arrivals + tile * SHARED_CHUNKS + chunk, split, tokens,
                    in_features, stride_x, SHARED_SPLITS, SHARED_BLOCK_K, HEIGHT, CHUNK, PDL,
                )  # fmt: skip
            tile += pairs_launched


@triton.jit
def _shrink_ranks(
    x,
    factor,
    in_features,
    rank_start,
    rank,
    rows,
    count,
    h,
    stride_h,
    stride_x,
    RANKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if rank_start < rank:
        r = rank_start + tl.arange(0, RANKS)
        a_row = factor + r[:, None].to(tl.int64) * in_features
        k = tl.arange(0, BLOCK_K)[None, :]
        a = _load_a(a_row, r < rank, k, in_features)
        if PDL:
            gdc_wait()
        for group in range(0, count, 4):
            row0, live0 = row_at(rows, group, count)
            row1, live1 = row_at(rows, group + 1, count)
            row2, live2 = row_at(rows, group + 2, count)
            row3, live3 = row_at(rows, group + 3, count)
            end0, end1 = tl.where(live0, in_features, 0), tl.where(live1, in_features, 0)
            end2, end3 = tl.where(live2, in_features, 0), tl.where(live3, in_features, 0)
            x0, x1, x2, x3 = x + row0 * stride_x, x + row1 * stride_x, x + row2 * stride_x, x + row3 * stride_x
            if ONE_BLOCK:
                h0 = tl.sum(_multiply(a, x0, k, end0), axis=1)
                h1 = tl.sum(_multiply(a, x1, k, end1), axis=1)
                h2 = tl.sum(_multiply(a, x2, k, end2), axis=1)
                h3 = tl.sum(_multiply(a, x3, k, end3), axis=1)
            else:
                h0, h1, h2, h3 = _sum_blocks(
                    a, a_row, r < rank, k, x0, x1, x2, x3, end0, end1, end2, end3, in_features, BLOCK_K
                )
            h_at = h + r
            tl.store(h_at + row0 * stride_h, h0, mask=r < tl.where(live0, rank, 0))
            tl.store(h_at + row1 * stride_h, h1, mask=r < tl.where(live1, rank, 0))
            tl.store(h_at + row2 * stride_h, h2, mask=r < tl.where(live2, rank, 0))
            tl.store(h_at + row3 * stride_h, h3, mask=r < tl.where(live3, rank, 0))


@triton.jit
def _sum_blocks(
    a, a_row, r_mask, k, x0, x1, x2, x3, end0, end1, end2, end3, in_features, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Four rows of h; products are added element by element, and the threads add theirs up once, at the end."""
    sum0 = _multiply(a, x0, k, end0)
    sum1 = _multiply(a, x1, k, end1)
    sum2 = _multiply(a, x2, k, end2)
    sum3 = _multiply(a, x3, k, end3)
    block = _load_a(a_row, r_mask, BLOCK_K + k, in_features)
    for start in range(BLOCK_K, in_features, BLOCK_K):
        at = start + k
        following = _load_a(a_row, r_mask, at + BLOCK_K, in_features)
        sum0 += _multiply(block, x0, at, end0)
        sum1 += _multiply(block, x1, at, end1)
        sum2 += _multiply(block, x2, at, end2)
        sum3 += _multiply(block, x3, at, end3)
        block = following
    return tl.sum(sum0, axis=1), tl.sum(sum1, axis=1), tl.sum(sum2, axis=1), tl.sum(sum3, axis=1)


@triton.jit
def _load_a(a_row, r_mask, k, in_features):
    return tl.load(a_row + k, mask=r_mask[:, None] & (k < in_features), other=0.0)


@triton.jit
def _shrink_pair(
    x,
    factor,
    stride_factor,
    rank_start,
    rank,
    rows,
    count,
    h,
    partial,
    stride_h,
    arrived,
    split,
    tokens,
    in_features,
    stride_x,
    SPLITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HEIGHT: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The rows of all adapters of a pair share its factor, so here a matrix unit pays.

    A few programs could not read the factor fast enough: its columns are shared out, and the program that is done last
    adds up the splits, always in the same order. The sum of a block is shared out over LANES products that do not wait
    for one another. arrived: programs that are done; 0 before and after.
    """
    lane = tl.arange(0, HEIGHT)
    row_mask = lane < count
    row = tl.load(rows + lane, mask=row_mask, other=0, eviction_policy="evict_last").to(tl.int64)
    r = rank_start + tl.arange(0, CHUNK)
    width = tl.cdiv(tl.cdiv(in_features, SPLITS), BLOCK_K) * BLOCK_K
    part = tl.arange(0, LANES)[:, None, None] * (BLOCK_K // LANES)
    within = tl.arange(0, BLOCK_K // LANES)
    x_at = x + row[None, :, None] * stride_x + part + within[None, None, :]
    a_at = factor + r[None, None, :].to(tl.int64) * stride_factor + part + within[None, :, None]
    if PDL:
        gdc_wait()
    acc = tl.zeros((LANES, HEIGHT, CHUNK), dtype=tl.float32)
    for start in tl.range(split * width, min(in_features, (split + 1) * width), BLOCK_K, num_stages=3):
        left = in_features - start - part
        x_block = tl.load(x_at + start, mask=row_mask[None, :, None] & (within[None, None, :] < left), other=0.0)
        a_block = tl.load(a_at + start, mask=(r < rank)[None, None, :] & (within[None, :, None] < left), other=0.0)
        acc = tl.dot(x_block, a_block, acc, input_precision="ieee")
    at = row[:, None] * stride_h + r[None, :]
    mask = row_mask[:, None] & (r < rank)[None, :]
    stride_split = tokens.to(tl.int64) * stride_h
    tl.store(partial + split * stride_split + at, tl.sum(acc, axis=0), mask=mask)
    tl.debug_barrier()  # all threads have stored before one of them says so
    if tl.atomic_add(arrived, 1, sem="acq_rel") == SPLITS - 1:
        total = tl.load(partial + at, mask=mask, other=0.0)
        for i in tl.static_range(1, SPLITS):
            total += tl.load(partial + i * stride_split + at, mask=mask, other=0.0)
        tl.store(h + at, total, mask=mask)
        tl.store(arrived, 0)


@triton.jit
def _multiply(a, x_row, k, end):
    """Each element of a [RANKS, K] times its element of one row of x."""
    return a.to(tl.float32) * tl.load(x_row + k, mask=k < end, other=0.0).to(tl.float32)

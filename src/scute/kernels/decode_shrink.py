"""The shrink of a decode batch, where every adapter has few rows: all about reading its weights once, and soon.

Plain multiplications on the rows there are: a matrix unit works on sixteen rows, of which three or four would be real.
Rows go in groups of four, so that a weight in a register serves four of them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from scute.kernels.device import RANK, A, Number, entry_of, field, is_used, piece, row_at

LANES = Number(4)


@triton.jit(do_not_specialize=["tokens", "items_end"])
def shrink_rows(
    x,
    factors,
    table,
    shared_a,
    pair_rank,
    items,
    rows,
    shared_rows,
    h,
    shared_h,
    items_end,
    tokens,
    in_features,
    stride_h,
    stride_shared_h,
    stride_x,
    stride_slot,
    stride_pair,
    stride_shared,
    PARTS: tl.constexpr,
    SHARED: tl.constexpr,
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
    """h[slice, row, :rank] = x[row] A^T; grid (item and RANKS of its CHUNK ranks, slice), as far as it goes at once.

    A program reads its ranks over all columns of x, so no sum is shared out. Items of a shared pair write
    shared_h[split, row, :pair rank], once for all slices; there the programs of an item share out the columns.

    BESIDE_GEMM: the launch before is `fused_gemm`, which lets this one start only when x is there. Nothing waits for it
    then but the end.
    """
    if PDL:
        gdc_launch_dependents()
    item = tl.program_id(0) // PARTS
    while is_used(items, item, items_end, 4):
        shrink_part(
            x, factors, table, shared_a, pair_rank, items + item * 4, rows, shared_rows, h, shared_h,
            tl.program_id(0) % PARTS, tl.program_id(1), tokens, in_features, stride_h, stride_shared_h, stride_x,
            stride_slot, stride_pair, stride_shared,
            SHARED, SHARED_SPLITS, SHARED_BLOCK_K, HEIGHT, CHUNK, RANKS, BLOCK_K, ONE_BLOCK, PDL and not BESIDE_GEMM,
        )  # fmt: skip
        item += tl.num_programs(0) // PARTS
    # The expand waits for this launch alone, so this one must not end before those before it.
    if PDL:
        gdc_wait()


@triton.jit
def shrink_part(
    x,
    factors,
    table,
    shared_a,
    pair_rank,
    item,
    rows,
    shared_rows,
    h,
    shared_h,
    part,
    slice_index,
    tokens,
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
    PDL: tl.constexpr,
):
    """Part `part` of an item: RANKS of a slot's ranks, or one split of the columns for a pair."""
    segment = field(item, 0)
    first = field(item, 1)
    count = field(item, 2)
    rank_start = field(item, 3)
    # The plan is the batch's: it has items of pairs for a layer that serves none, too.
    if segment < 0:
        if SHARED:  # noqa: SIM102 - decided when it is compiled
            if (slice_index == 0) & (part < SHARED_SPLITS):
                pair = (-1 - segment).to(tl.int64)
                _shrink_pair(
                    x, shared_a + pair * stride_pair, stride_shared, rank_start, tl.load(pair_rank + pair),
                    shared_rows + first, count, shared_h, stride_shared_h, part, tokens, in_features, stride_x,
                    SHARED_SPLITS, SHARED_BLOCK_K, HEIGHT, CHUNK, PDL,
                )  # fmt: skip
    else:
        entry = entry_of(table, segment, slice_index, stride_slot)
        _shrink_ranks(
            x, piece(factors, field(entry, A)), in_features, rank_start + part * RANKS, field(entry, RANK),
            rows + first, count, h + slice_index * tokens.to(tl.int64) * stride_h, stride_h, stride_x,
            RANKS, BLOCK_K, ONE_BLOCK, PDL,
        )  # fmt: skip


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
    stride_h,
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

    The sum of a block is shared out over LANES products that do not wait for one another.
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
    at = h + (split.to(tl.int64) * tokens + row[:, None]) * stride_h + r[None, :]
    tl.store(at, tl.sum(acc, axis=0), mask=row_mask[:, None] & (r < rank)[None, :])


@triton.jit
def _multiply(a, x_row, k, end):
    """Each element of a [RANKS, K] times its element of one row of x."""
    return a.to(tl.float32) * tl.load(x_row + k, mask=k < end, other=0.0).to(tl.float32)

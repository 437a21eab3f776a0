"""The shrink of a prefill batch, where every adapter has many rows: matrix units on tiles of many rows."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from scute.kernels.device import RANK, A, entry_of, field, piece
from scute.kernels.kernel import kernel


@kernel("tokens")
def shrink_tiles(
    x,
    factors,
    table,
    items,
    rows,
    partial,
    tokens,
    in_features,
    stride_partial,
    stride_x,
    stride_slot,
    SLICES: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT_WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    LONG_BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """partial[split, slice, row, :rank] = x[row] A^T over the columns of one split; grid (item and slice, split).

    Slices of one item run together, so that all but the first find its rows of x in L2. LONG_BLOCK_R: ranks at a time
    of a slot of more than BLOCK_R, 0 where the batch has none.
    """
    if PDL:
        gdc_launch_dependents()
    item = items + tl.program_id(0) // SLICES * 4
    slice_index = tl.program_id(0) % SLICES
    split = tl.program_id(1)
    slot = field(item, 0)
    first = field(item, 1)
    count = field(item, 2)
    rank_start = field(item, 3)
    if count > 0:
        entry = entry_of(table, slot, slice_index, stride_slot)
        lane = tl.arange(0, HEIGHT)
        row_mask = lane < count
        row = tl.load(rows + first + lane, mask=row_mask, other=0).to(tl.int64)
        out = partial + ((split.to(tl.int64) * SLICES + slice_index) * tokens + row[:, None]) * stride_partial
        factor, rank = piece(factors, field(entry, A)), field(entry, RANK)
        rank_end = min(rank, rank_start + CHUNK)
        if LONG_BLOCK_R > 0 and rank > BLOCK_R:
            _shrink_chunk(
                x, row, row_mask, factor, in_features, out, rank_start, rank_end, split, in_features, stride_x,
                SPLIT_WIDTH, HEIGHT, LONG_BLOCK_R, BLOCK_K, STAGES, PDL,
            )  # fmt: skip
        else:
            _shrink_chunk(
                x, row, row_mask, factor, in_features, out, rank_start, rank_end, split, in_features, stride_x,
                SPLIT_WIDTH, HEIGHT, BLOCK_R, BLOCK_K, STAGES, PDL,
            )  # fmt: skip
    # The expand waits for this launch alone, so this one must not end before those before it.
    if PDL:
        gdc_wait()


@kernel("tokens")
def shrink_pair_tiles(
    x,
    shared_a,
    pair_rank,
    shared_tiles,
    shared_rows,
    shared_partial,
    tokens,
    in_features,
    chunks,
    stride_partial,
    stride_x,
    stride_pair,
    stride_shared,
    CHUNK: tl.constexpr,
    SPLIT_WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """shared_partial[split, row, :rank] = x[row] A_shared^T, as `shrink_tiles`; grid (tile and chunk of ranks, split).

    A kernel of its own, since its large blocks would leave the other's programs few registers.
    """
    if PDL:
        gdc_launch_dependents()
    tile = shared_tiles + tl.program_id(0) // chunks * 3
    rank_start = tl.program_id(0) % chunks * CHUNK
    split = tl.program_id(1)
    pair = field(tile, 0).to(tl.int64)
    first = field(tile, 1)
    count = field(tile, 2)
    if count > 0:
        lane = tl.arange(0, HEIGHT)
        row_mask = lane < count
        row = tl.load(shared_rows + first + lane, mask=row_mask, other=0).to(tl.int64)
        out = shared_partial + (split.to(tl.int64) * tokens + row[:, None]) * stride_partial
        _shrink_chunk(
            x, row, row_mask, shared_a + pair * stride_pair, stride_shared, out, rank_start,
            min(tl.load(pair_rank + pair), rank_start + CHUNK), split, in_features, stride_x,
            SPLIT_WIDTH, HEIGHT, BLOCK_R, BLOCK_K, STAGES, PDL,
        )  # fmt: skip
    # The expand waits for this launch alone, so this one must not end before those before it.
    if PDL:
        gdc_wait()


@triton.jit
def _shrink_chunk(
    x,
    row,
    row_mask,
    factor,
    stride_factor,
    out,
    rank_start,
    rank_end,
    split,
    in_features,
    stride_x,
    SPLIT_WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    # x is older than the launch before this one, which may still run: wait for it, and so for all before it.
    if PDL:
        gdc_wait()
    x_row = x + row[:, None] * stride_x
    for r_start in range(rank_start, rank_end, BLOCK_R):
        r = r_start + tl.arange(0, BLOCK_R)
        r_mask = r < rank_end
        acc = tl.zeros((HEIGHT, BLOCK_R), dtype=tl.float32)
        for start in tl.range(0, SPLIT_WIDTH, BLOCK_K, num_stages=STAGES):
            k = split * SPLIT_WIDTH + start + tl.arange(0, BLOCK_K)
            k_mask = k < in_features
            x_block = tl.load(x_row + k[None, :], mask=row_mask[:, None] & k_mask[None, :], other=0.0)
            a_block = tl.load(
                factor + r[None, :].to(tl.int64) * stride_factor + k[:, None],
                mask=r_mask[None, :] & k_mask[:, None],
                other=0.0,
            )
            acc = tl.dot(x_block, a_block, acc, input_precision="ieee")
        tl.store(out + r[None, :], acc, mask=row_mask[:, None] & r_mask[None, :])

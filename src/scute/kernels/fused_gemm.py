"""A decode GEMM that picks its input by output slice: one launch that reads the weights once."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from scute.kernels.device import slice_of
from scute.kernels.kernel import kernel


@kernel("tokens")
def fused_gemm(
    y,
    inputs,
    weight,
    bias,
    partial,
    arrivals,
    starts,
    tokens,
    in_features,
    stride_weight,
    stride_y,
    SLICES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[:, slice] = inputs[slice] W[slice]^T + bias; inputs [slices, tokens, in].

    Grid (block of columns, of rows, split). Programs of a block share out the columns of x, and the one that is done
    last adds up what the SPLITS of them wrote to partial [split, tokens, out], in their order. arrivals: programs of a
    block that are done; 0 before and after.

    A shrink that follows runs beside this GEMM: it needs x alone, which is there once the rotation of x is.
    """
    slice_index, start, end, offset = slice_of(tl.program_id(0), starts, BLOCK_N, SLICES)
    if ALIGNED:
        start = tl.multiple_of(start, 16)
        offset = tl.multiple_of(offset, 16)
    column = start + offset + tl.arange(0, BLOCK_N)
    column_mask = column < end
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = row < tokens
    x = inputs + (slice_index * tokens.to(tl.int64) + row[:, None]) * in_features
    w = weight + column[None, :].to(tl.int64) * stride_weight
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    split = tl.program_id(2)
    width = tl.cdiv(tl.cdiv(in_features, SPLITS), BLOCK_K) * BLOCK_K
    for k_start in tl.range(split * width, min(in_features, (split + 1) * width), BLOCK_K, num_stages=STAGES):
        k = k_start + tl.arange(0, BLOCK_K)
        k_mask = k < in_features
        x_block = tl.load(x + k[None, :], mask=row_mask[:, None] & k_mask[None, :], other=0.0)
        w_block = tl.load(w + k[:, None], mask=k_mask[:, None] & column_mask[None, :], other=0.0)
        acc = tl.dot(x_block, w_block, acc, input_precision="ieee")
    at = row[:, None].to(tl.int64) * stride_y + column[None, :]
    mask = row_mask[:, None] & column_mask[None, :]
    is_last = True
    if SPLITS > 1:
        stride_split = tokens.to(tl.int64) * stride_y
        tl.store(partial + split * stride_split + at, acc, mask=mask)
        arrived = arrivals + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        tl.debug_barrier()  # all threads have stored before one of them says so
        is_last = tl.atomic_add(arrived, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            tl.store(arrived, 0)
            acc = tl.load(partial + at, mask=mask, other=0.0)
            for i in tl.static_range(1, SPLITS):
                acc += tl.load(partial + i * stride_split + at, mask=mask, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    if is_last:
        tl.store(y + at, acc.to(y.dtype.element_ty), mask=mask)

"""The rotation pass: x R for the rows of adapters that rotate their input (paper, section 4.1)."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from scute.kernels.blocks import WARPS
from scute.kernels.device import load_tile
from scute.kernels.linear import sliced_linear
from scute.kernels.plan import tiles_for
from scute.kernels.routes import Route

_BLOCK = 64


def rotate(
    x: Tensor,
    rotation: Tensor,
    width: Tensor,
    max_width: int,  # noqa: ARG001
    rows: Tensor,
    tiles_small: Tensor,
    tiles_large: Tensor,
    live: Tensor,
) -> Tensor:
    """Launch the op `rotate` on CUDA tensors."""
    slots, slices, _ = rotation.shape
    tokens, in_features = x.shape
    out = x.unsqueeze(0).repeat(slices, 1, 1)
    if not live.tolist()[Route.ROTATION] or not tokens:
        return out
    tiles, launched, height = tiles_for(tokens, slots, tiles_small, tiles_large)
    _rotate[(launched, triton.cdiv(in_features, _BLOCK), slices)](
        out,
        x,
        rotation,
        width,
        rows,
        tiles,
        in_features,
        slices,
        tokens,
        x.stride(0),
        rotation.stride(0),
        rotation.stride(1),
        HEIGHT=height,
        BLOCK=_BLOCK,
        num_warps=WARPS,
        num_stages=1,
    )
    return out


def base_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slice_starts_host: list[int],
    rotation: Tensor,
    width: Tensor,
    max_width: int,
    rows: Tensor,
    tiles_small: Tensor,
    tiles_large: Tensor,
    live: Tensor,
) -> Tensor:
    """Launch the op `base_linear` on CUDA tensors."""
    if not live.tolist()[Route.ROTATION]:
        return functional.linear(x, weight, bias)
    inputs = rotate(x, rotation, width, max_width, rows, tiles_small, tiles_large, live)
    return sliced_linear(inputs, weight, bias, slice_starts_host)


@triton.jit(do_not_specialize=["tokens"])
def _rotate(
    out,
    x,
    rotation,
    width,
    rows,
    tiles,
    in_features,
    slices,
    tokens,
    stride_x,
    stride_rotation,
    stride_rotation_slice,
    HEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[slice, row] = x[row] + x[row] D; grid (tile, block of columns, slice).

    A block of columns multiplies the columns of x that its rotation blocks reach. Elements of D outside those blocks
    count as zero, so the width need not divide BLOCK nor the other way round.
    """
    slot, _, count, row, row_mask = load_tile(tiles, rows, tl.program_id(0), HEIGHT)
    if count == 0:
        return
    slice_index = tl.program_id(2)
    w = tl.load(width + slot * slices + slice_index)
    if w == 0:
        return
    rotation += slot.to(tl.int64) * stride_rotation + slice_index.to(tl.int64) * stride_rotation_slice
    first_column = tl.program_id(1) * BLOCK
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
        x_block = tl.load(x + row[:, None] * stride_x + k[None, :], mask=row_mask[:, None] & k_mask[None, :], other=0.0)
        same_block = (k // w)[:, None] == (column // w)[None, :]
        d_block = tl.load(
            rotation + k[:, None].to(tl.int64) * w + (column % w)[None, :],
            mask=same_block & k_mask[:, None] & column_mask[None, :],
            other=0.0,
        )
        acc = tl.dot(x_block, d_block, acc, input_precision="ieee")
    mask = row_mask[:, None] & column_mask[None, :]
    total = tl.load(x + row[:, None] * stride_x + column[None, :], mask=mask, other=0.0).to(tl.float32) + acc
    out += (slice_index.to(tl.int64) * tokens + row[:, None]) * in_features
    tl.store(out + column[None, :], total.to(out.dtype.element_ty), mask=mask)

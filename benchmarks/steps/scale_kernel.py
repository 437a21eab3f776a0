"""A pass that multiplies rows by the scale of their adapter, as a comparison: Scute's expand does it on the way."""

import triton
import triton.language as tl


@triton.jit
def scale_rows_kernel(y, scale, slot_of_row, columns, BLOCK: tl.constexpr):
    """Grid (row, block of columns); y and scale are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    slot = tl.load(slot_of_row + row).to(tl.int64)
    value = tl.load(y + row * columns + column, mask=mask).to(tl.float32)
    factor = tl.load(scale + slot * columns + column, mask=mask).to(tl.float32)
    tl.store(y + row * columns + column, (value * factor).to(y.dtype.element_ty), mask=mask)

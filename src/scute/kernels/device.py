"""Device functions that the kernels have in common: table entries, pieces of the arena, tiles, wide products."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from scute.kernels.routes import FIELDS, UNIT_BYTES, Field, Flag


class Number(tl.constexpr):  # type: ignore[misc]
    """A global that kernels may read. Triton compares all of a kernel's at every launch, with a slow operator."""

    def __ne__(self, other):
        return not isinstance(other, tl.constexpr) or self.value != other.value


RANK = Number(int(Field.RANK))
FLAGS = Number(int(Field.FLAGS))
A = Number(int(Field.A))
B = Number(int(Field.B))
SCALE_AT = Number(int(Field.SCALE))
SHIFT_AT = Number(int(Field.SHIFT))
D = Number(int(Field.D))
E = Number(int(Field.E))
ROTATION = Number(int(Field.ROTATION))
WIDTH = Number(int(Field.WIDTH))
PAIR = Number(int(Field.PAIR))
HAS_SCALE = Number(int(Flag.SCALE))
HAS_SHIFT = Number(int(Flag.SHIFT))
HAS_SHARED = Number(int(Flag.SHARED))

_FIELDS = Number(FIELDS)
_UNIT_BYTES = Number(UNIT_BYTES)


@triton.jit
def entry_of(table, slot, slice_index, stride_slot):
    """Where the table's entry of a slot and slice starts."""
    return table + slot.to(tl.int64) * stride_slot + slice_index * _FIELDS


@triton.jit
def field(entry, index: tl.constexpr):
    """One number of an entry of the table, or of a list of the plan.

    Kept in L2: every layer reads the plan and every step the table, after all the weights in between.
    """
    return tl.load(entry + index, eviction_policy="evict_last")


@triton.jit
def is_used(records, index, end, FIELDS_OF_RECORD: tl.constexpr):
    """Whether a list of the plan has a record `index` below `end`, by its count; the used ones come first."""
    at = records + index * FIELDS_OF_RECORD + 2
    return tl.load(at, mask=index < end, other=0, eviction_policy="evict_last") > 0


@triton.jit
def piece(arena, unit):
    """Pointer to the piece of the arena that starts at `unit`."""
    return arena + unit.to(tl.int64) * (_UNIT_BYTES // (arena.dtype.element_ty.primitive_bitwidth // 8))


@triton.jit
def row_at(rows, lane, count):
    """Row of the batch at position `lane` of a tile of `count`, and whether it exists."""
    live = lane < count
    return tl.load(rows + lane, mask=live, other=0, eviction_policy="evict_last").to(tl.int64), live


@triton.jit
def slice_of(block, starts, width, SLICES: tl.constexpr):
    """Of piece `block` of y's columns, cut by slice: (slice, its first column, its end, the piece's offset in it)."""
    slice_index = 0
    start = starts[0]
    end = starts[1]
    first = 0
    next_first = tl.cdiv(end - start, width)
    for i in tl.static_range(1, SLICES):
        if block >= next_first:
            slice_index = i
            start = starts[i]
            end = starts[i + 1]
            first = next_first
        next_first += tl.cdiv(starts[i + 1] - starts[i], width)
    return slice_index, start, end, (block - first) * width


@triton.jit
def element_of(values, index, COUNT: tl.constexpr):
    """Element `index` of a tuple, where `index` is known only at run time."""
    value = values[0]
    for i in tl.static_range(1, COUNT):
        if index == i:
            value = values[i]
    return value


@triton.jit
def sum_splits(partial, row_mask, r, rank, stride_split, SPLITS: tl.constexpr):
    """h [rows, ranks]: the partial sums of all splits, always added in the same order; 0 from `rank` on.

    partial: pointers to the rows of split 0, [rows, 1]. Whole blocks of ranks are read, what lies past the rank is
    dropped: a mask there would make every load narrow.
    """
    h = tl.load(partial + r[None, :], mask=row_mask[:, None], other=0.0)
    for i in tl.static_range(1, SPLITS):
        h += tl.load(partial + i * stride_split + r[None, :], mask=row_mask[:, None], other=0.0)
    return tl.where((r < rank)[None, :], h, 0.0)


@triton.jit
def dot_wide(h, factor, acc):
    """acc + h @ factor for float32 h; a 16-bit factor meets h as two 16-bit parts, which keep its mantissa."""
    if factor.dtype == tl.float32:
        acc = tl.dot(h, factor, acc, input_precision="ieee")
    else:
        high = h.to(factor.dtype)
        low = (h - high.to(tl.float32)).to(factor.dtype)
        acc = tl.dot(high, factor, acc)
        acc = tl.dot(low, factor, acc)
    return acc

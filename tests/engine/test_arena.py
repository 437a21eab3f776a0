"""The arena: what is taken never overlaps, what is given back is used again, and what moves stays whole."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from scute.engine.arena import Arena, Extents
from scute.engine.packing import PackedAdapter, lay_out
from scute.engine.pieces import SliceSlots
from scute.kernels.routes import FIELDS, UNIT_BYTES, Field, Flag

SIZE = 64


@given(st.lists(st.one_of(st.integers(1, SIZE), st.integers(-20, -1)), max_size=80))
def test_extents_against_a_map_of_units(steps: list[int]):
    """A positive step takes that many units, a negative one gives a run back; the map is the truth."""
    extents, owner = Extents(SIZE), np.zeros(SIZE, dtype=int)
    runs: list[tuple[int, int]] = []
    for name, step in enumerate(steps, start=1):
        if step < 0 and runs:
            start, length = runs.pop(step % len(runs))
            assert (owner[start : start + length] == owner[start]).all()
            owner[start : start + length] = 0
            extents.give_back(start)
        elif step > 0:
            start = extents.take(step)
            if start is None:
                assert longest_hole(owner) < step
                continue
            assert start == first_hole(owner, step)
            owner[start : start + step] = name
            runs.append((start, step))
        assert extents.free == np.count_nonzero(owner == 0)
    for start, _ in runs:
        extents.give_back(start)
    assert extents.take(SIZE) == 0


def holes(owner: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([1], owner != 0, [1]))))
    return [(int(start), int(end - start)) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def first_hole(owner: np.ndarray, length: int) -> int:
    return next(start for start, room in holes(owner) if room >= length)


def longest_hole(owner: np.ndarray) -> int:
    return max((room for _, room in holes(owner)), default=0)


def test_exact_reuse():
    extents = Extents(10)
    starts = [extents.take(n) for n in [3, 4, 3]]
    assert starts == [0, 3, 7]
    assert extents.take(1) is None
    extents.give_back(3)
    assert extents.take(5) is None
    assert extents.take(4) == 3
    with pytest.raises(KeyError):
        extents.give_back(1)


def test_nothing_fits_nothing():
    assert Extents(0).take(1) is None


IN, OUT, SLOTS, SLICES, ZEROS = 6, (4, 2), 4, 2, 1


def adapter(value: float, rank: int = 3) -> PackedAdapter:
    """Every slot on both slices, all filled with the value."""

    def full(*shape: int) -> Tensor:
        return torch.full(shape, value)

    slices = {
        i: SliceSlots(full(rank, IN), full(rank, out), full(out), full(out), full(5), full(out), full(IN * 2), 2)
        for i, out in enumerate(OUT)
    }
    return PackedAdapter("LoRA", *lay_out(slices, SLICES, pinned=False), None, 0)


def arena(capacity: int) -> Arena:
    return Arena(capacity, ZEROS, SLOTS, SLICES, torch.device("cpu"))


def holds(arena: Arena, slot: int, value: float, pair: int = -1) -> bool:
    """Whether every piece that the table names for the slot has the value."""
    values = arena.memory.view(torch.float32)
    sizes = {Field.A: 3 * IN, Field.D: 5, Field.ROTATION: IN * 2}
    for entry, out in zip(arena.table[slot].tolist(), OUT, strict=True):
        assert (entry[Field.RANK], entry[Field.WIDTH], entry[Field.PAIR]) == (3, 2, pair)
        assert entry[Field.FLAGS] == Flag.SCALE | Flag.SHIFT | Flag.SHARED | Flag.ROTATION
        for field in range(Field.A, Field.ROTATION + 1):
            size = sizes.get(field, 3 * out if field == Field.B else out)
            first = entry[field] * UNIT_BYTES // 4
            if entry[field] < ZEROS or not (values[first : first + size] == value).all():
                return False
    return True


UNITS = adapter(0.0).units


def test_an_empty_arena_is_the_identity():
    assert not arena(UNITS).table.any()


def test_adapters_lie_side_by_side():
    full = arena(3 * UNITS)
    for slot in range(3):
        full.write(slot, adapter(slot + 1.0), slot - 1)
    assert all(holds(full, slot, slot + 1.0, slot - 1) for slot in range(3))
    assert not full.memory[: ZEROS * UNIT_BYTES].any()
    assert not full.table[3].any()


def test_the_next_adapter_leaves_nothing_of_the_last():
    """The memory may keep old values; the table must not let a kernel read them."""
    one = arena(UNITS)
    one.write(1, adapter(7.0), 2)
    one.release(1)
    scale_only = PackedAdapter("(IA)3", *lay_out({1: SliceSlots(scale=torch.ones(2))}, SLICES, False), None, 0)
    one.write(1, scale_only, -1)
    first, second = one.table[1].tolist()
    assert [first[Field.RANK], first[Field.FLAGS], first[Field.WIDTH]] == [0, 0, 0]
    assert [second[Field.RANK], second[Field.FLAGS], second[Field.WIDTH]] == [0, Flag.SCALE, 0]


def test_what_is_too_scattered_is_moved_together():
    """Half of the arena is free, but in two holes."""
    scattered = arena(4 * UNITS)
    for slot in range(4):
        scattered.write(slot, adapter(slot + 1.0), slot)
    for slot in [0, 2]:
        scattered.release(slot)
    large = adapter(9.0, rank=24)
    assert UNITS < large.units <= 2 * UNITS
    scattered.write(0, large, -1)
    assert holds(scattered, 1, 2.0, 1)
    assert holds(scattered, 3, 4.0, 3)
    start = scattered.table[0, 0, Field.A] * UNIT_BYTES // 4
    assert (scattered.memory.view(torch.float32)[start : start + 24 * IN] == 9.0).all()


def test_what_cannot_fit_raises():
    small = arena(UNITS)
    small.write(0, adapter(1.0), -1)
    with pytest.raises(RuntimeError, match="admission"):
        small.write(1, adapter(2.0), -1)
    small.release(0)
    small.write(1, adapter(2.0), -1)
    assert holds(small, 1, 2.0)


def test_a_part_of_no_size_needs_no_room():
    """A pipeline stage may have nothing of an adapter."""
    full = arena(UNITS)
    full.write(0, adapter(1.0), -1)
    nothing = PackedAdapter("LoRA", *lay_out({}, SLICES, pinned=False), None, 0)
    full.write(1, nothing, -1)
    assert not full.table[1, :, : Field.A].any()
    full.release(1)
    assert holds(full, 0, 1.0)


def test_a_dummy_reads_zeros():
    full = arena(UNITS)
    full.write(0, adapter(1.0), -1)
    full.release(0)
    full.mark(0, rank=2)
    assert (full.table[0, :, Field.RANK] == 2).all()
    assert not full.table[0, :, Field.FLAGS :].any()
    assert not full.memory[: ZEROS * UNIT_BYTES].any()


def test_clear_frees_everything():
    full = arena(UNITS)
    for _ in range(2):
        full.write(0, adapter(1.0), -1)
        full.clear()
    full.write(3, adapter(2.0), -1)
    assert holds(full, 3, 2.0)


def test_the_arena_never_moves():
    """CUDA graphs hold its addresses."""
    full = arena(2 * UNITS)
    before = full.memory.data_ptr(), full.table.data_ptr()
    for slot in [0, 1]:
        full.write(slot, adapter(1.0), -1)
    full.release(0)
    full.write(0, adapter(2.0), -1)
    full.clear()
    assert before == (full.memory.data_ptr(), full.table.data_ptr())


@pytest.mark.parametrize(
    ("piece", "rank", "flags", "width"),
    [
        (SliceSlots(), 0, 0, 0),
        (SliceSlots(a=torch.ones(2, IN), b=torch.ones(2, 4)), 2, 0, 0),
        (SliceSlots(scale=torch.ones(4)), 0, Flag.SCALE, 0),
        (SliceSlots(shift=torch.ones(4)), 0, Flag.SHIFT, 0),
        (SliceSlots(d=torch.ones(5), e=torch.ones(4)), 0, Flag.SHARED, 0),
        (SliceSlots(rotation=torch.ones(IN), width=1), 0, Flag.ROTATION, 1),
    ],
)
def test_entry_of_a_piece(piece: SliceSlots, rank: int, flags: int, width: int):
    buffer, entries = lay_out({2: piece}, 3, pinned=False)
    assert entries.shape == (3, FIELDS)
    assert not entries[:2].any()
    assert entries[2, [Field.RANK, Field.FLAGS, Field.WIDTH]].tolist() == [rank, flags, width]
    assert buffer.numel() == UNIT_BYTES * len(list(piece.pieces())) == UNIT_BYTES * piece.units


def test_rows_of_a_transposed_factor_are_laid_out_in_order():
    a = torch.arange(12.0).view(IN, 2).T
    buffer, _ = lay_out({0: SliceSlots(a=a, b=torch.ones(2, 4))}, 1, pinned=False)
    assert torch.equal(buffer[: a.nbytes].view(torch.float32).view(2, IN), a)

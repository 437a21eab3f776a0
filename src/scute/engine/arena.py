"""The device memory of the active adapters: one arena of bytes, and the table that says what lies where.

Both are allocated once, while vLLM loads the model, so that its memory profile counts them, and never move, so that
CUDA graphs may hold their addresses. What a slot has is said by the table, not by the values.
"""

import bisect
from dataclasses import dataclass

import torch

from scute.admission.memory import GIB
from scute.engine.packing import PackedAdapter
from scute.errors import Incompatible
from scute.kernels.routes import FIELDS, UNIT_BYTES, Field


class Extents:
    """Which runs of units are taken; the first hole that is large enough is used."""

    def __init__(self, size: int) -> None:
        self._holes: list[tuple[int, int]] = [(0, size)] if size else []  # (start, length), sorted, never adjacent
        self._taken: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Units that are not taken, in however many holes."""
        return sum(length for _, length in self._holes)

    def take(self, length: int) -> int | None:
        """Start of a run of at least one unit, or None if no hole is as large."""
        for index, (start, room) in enumerate(self._holes):
            if room >= length:
                self._holes[index : index + 1] = [(start + length, room - length)] if room > length else []
                self._taken[start] = length
                return start
        return None

    def give_back(self, start: int) -> None:
        """Free the run that `take` returned, and join it with the holes beside it."""
        end = start + self._taken.pop(start)
        index = bisect.bisect_left(self._holes, (start, 0))
        first = last = index
        if index and sum(self._holes[index - 1]) == start:
            first, start = index - 1, self._holes[index - 1][0]
        if index < len(self._holes) and self._holes[index][0] == end:
            last, end = index + 1, sum(self._holes[index])
        self._holes[first:last] = [(start, end - start)]


@dataclass(slots=True)
class _Held:
    """What a slot holds, and where."""

    packed: PackedAdapter
    pair: int
    start: int


class Arena:
    """Every adapter that is active on this rank, each in one run of units.

    memory: uint8. table: int32 [slots, slices, FIELDS], with the slices of all layers one after the other; a layer
    reads its own columns. The first units are zeros that no adapter takes: warm-up dummies read them.
    """

    def __init__(self, capacity: int, zeros: int, slots: int, slices: int, device: torch.device) -> None:
        """capacity: units for adapters; zeros: units before them. Raises Incompatible if the device is too small."""
        self.capacity = capacity
        self._zeros = zeros
        try:
            self.memory = torch.zeros((zeros + capacity) * UNIT_BYTES, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise Incompatible(
                f"this device has no {capacity * UNIT_BYTES / GIB:.2f} GiB for adapters beside the model: lower "
                "adapter_memory_gib in additional_config['scute'], --max-loras or --max-lora-rank."
            ) from error
        self.table = torch.zeros(slots, slices, FIELDS, dtype=torch.int32, device=device)
        self._held: dict[int, _Held] = {}
        self._empty()

    @property
    def capacity_bytes(self) -> int:
        return self.capacity * UNIT_BYTES

    def write(self, slot: int, packed: PackedAdapter, pair: int) -> None:
        """Copy an adapter into a free slot: one run of bytes, and its rows of the table.

        The copies are ordered after the kernels that read the old contents, as all work of the current stream. pair:
        place of the shared pair that it refers to, or -1.
        """
        start = self._take(packed.units)
        if start is None:
            self._repack()
            start = self._take(packed.units)
        if start is None:
            raise RuntimeError(f"no {packed.units} units of {self.capacity} are free, though admission promised them")
        self._held[slot] = _Held(packed, pair, start)
        self._copy(slot)

    def mark(self, slot: int, rank: int) -> None:
        """Give a free slot factors of `rank` on every slice, all of them zeros; at most what `zeros` holds."""
        self.table[slot].zero_()
        self.table[slot, :, Field.RANK] = rank

    def release(self, slot: int) -> None:
        """Free what the slot holds, if anything; no row of a later step may refer to the slot."""
        held = self._held.pop(slot, None)
        if held is not None and held.packed.units:
            self._extents.give_back(held.start)

    def clear(self) -> None:
        """Free every slot."""
        self._held.clear()
        self._empty()

    def _empty(self) -> None:
        self._extents = Extents(self._zeros + self.capacity)
        if self._zeros:
            self._extents.take(self._zeros)

    def _take(self, units: int) -> int | None:
        """A pipeline stage may have no part of an adapter."""
        return self._extents.take(units) if units else 0

    def _repack(self) -> None:
        """Move all adapters back to back, in the order in which they lie; what moves is written from the host again."""
        self._empty()
        for slot, held in sorted(self._held.items(), key=lambda item: item[1].start):
            start = self._take(held.packed.units)
            assert start is not None
            if start != held.start:
                held.start = start
                self._copy(slot)

    def _copy(self, slot: int) -> None:
        held = self._held[slot]
        first, packed = held.start * UNIT_BYTES, held.packed
        # torch keeps pinned memory that is freed until the copies from it have run.
        entries = torch.empty(packed.entries.shape, dtype=torch.int32, pin_memory=self.table.is_cuda)
        rows = entries.numpy()
        rows[:] = packed.entries
        rows[:, Field.A : Field.ROTATION + 1] += held.start
        rows[:, Field.PAIR] = held.pair
        self.memory[first : first + packed.buffer.numel()].copy_(packed.buffer, non_blocking=True)
        self.table[slot].copy_(entries, non_blocking=True)

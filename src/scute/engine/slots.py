"""Which adapter each slot holds, as arrays on the host: what a step looks its rows up in."""

import numpy as np
import numpy.typing as npt

from scute.kernels.plan import Residents

BASE_ID = 0
"""What vLLM gives a row of the base model in place of an adapter's id."""

Ints = npt.NDArray[np.integer]


class ActiveSlots:
    """The adapters of all slots. No method loops over rows or slots in Python.

    residents: what the plan of a step reads. version: counts changes, so that a plan knows whether it is current.
    """

    def __init__(self, slots: int, pair_rank: npt.NDArray[np.int32]) -> None:
        """pair_rank: rank of every shared pair, kept up to date by its owner."""
        self.residents = Residents.none(slots, len(pair_rank))
        self.residents.pair_rank = pair_rank
        self.version = 0
        self._ids = np.full(slots, BASE_ID, dtype=np.int64)
        self._dummy = np.zeros(slots, dtype=bool)
        self._is_indexed = False

    def hold(self, slot: int, adapter_id: int, rank: int, pair: int, *, rotates: bool, dummy: bool = False) -> None:
        """Say what a slot holds from now on; pair is -1 without one."""
        self._ids[slot], self._dummy[slot] = adapter_id, dummy
        residents = self.residents
        residents.rank[slot], residents.pair[slot], residents.rotated[slot] = rank, pair, rotates
        self._changed()

    def release(self, slot: int) -> None:
        self.hold(slot, BASE_ID, rank=0, pair=-1, rotates=False)

    def clear(self) -> None:
        self._ids[:], self._dummy[:] = BASE_ID, False
        self.residents.rank[:], self.residents.pair[:], self.residents.rotated[:] = 0, -1, False
        self._changed()

    def find(self, adapter_ids: Ints) -> tuple[npt.NDArray[np.int32], bool]:
        """The slot of every row, -1 for base rows, and whether a warm-up dummy is among them.

        Raises LookupError for an adapter without a slot: its rows must not be served by the base model.
        """
        if not self._is_indexed:
            self._index()
        is_first = np.ones(len(adapter_ids), dtype=bool)  # rows of one request follow one another
        np.not_equal(adapter_ids[1:], adapter_ids[:-1], out=is_first[1:])
        starts = np.flatnonzero(is_first)
        ids = adapter_ids[starts]
        places = np.minimum(np.searchsorted(self._sorted_ids, ids), len(self._sorted_ids) - 1)
        unknown = ids[self._sorted_ids[places] != ids]
        if len(unknown):
            raise LookupError(f"adapter {unknown[0]} of this step has no slot")
        slots = self._sorted_slots[places]
        has_dummy = bool(self._dummy[slots[slots >= 0]].any())
        return np.repeat(slots, np.diff(starts, append=len(adapter_ids))), has_dummy

    def _changed(self) -> None:
        self.version += 1
        self._is_indexed = False

    def _index(self) -> None:
        slots = np.flatnonzero(self._ids)
        order = slots[np.argsort(self._ids[slots])]
        self._sorted_ids = np.concatenate(([BASE_ID], self._ids[order]))
        self._sorted_slots = np.concatenate(([-1], order)).astype(np.int32)
        self._is_indexed = True

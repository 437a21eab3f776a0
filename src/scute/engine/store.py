"""Compiled adapters in host memory, so that what vLLM evicts comes back without the disk."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from scute.engine.packing import PackedAdapter


@dataclass(frozen=True, slots=True)
class Entry:
    path: str
    packed: PackedAdapter


class HostStore:
    """Least recently used adapters are dropped once the files of the others exceed the budget.

    The budget counts bytes of files, not of shards: it must drop the same adapters on every tensor-parallel rank,
    because compiling a DoRA adapter again is a collective.
    """

    def __init__(self, budget_bytes: int, on_drop: Callable[[int], None]) -> None:
        self._budget = budget_bytes
        self._on_drop = on_drop
        self._entries: OrderedDict[int, Entry] = OrderedDict()

    def get(self, adapter_id: int, path: str) -> PackedAdapter | None:
        entry = self._entries.get(adapter_id)
        if entry is None or entry.path != path:
            return None
        self._entries.move_to_end(adapter_id)
        return entry.packed

    def put(self, adapter_id: int, path: str, packed: PackedAdapter, keep: set[int]) -> None:
        """Add or replace an adapter; then drop others, oldest first and none of `keep`, until the budget holds."""
        self._entries[adapter_id] = Entry(path, packed)
        self._entries.move_to_end(adapter_id)
        for victim in self.victims(keep | {adapter_id}):
            if self.num_bytes <= self._budget:
                break
            self.drop(victim)

    def victims(self, keep: set[int]) -> list[int]:
        """Adapters outside `keep`, least recently used first."""
        return [i for i in self._entries if i not in keep]

    def drop(self, adapter_id: int) -> None:
        if self._entries.pop(adapter_id, None) is not None:
            self._on_drop(adapter_id)

    def paths(self, method: str) -> list[tuple[int, str]]:
        """(id, folder) of the adapters of one method, least recently used first."""
        return [(i, e.path) for i, e in self._entries.items() if e.packed.method == method]

    @property
    def num_bytes(self) -> int:
        return sum(e.packed.file_bytes for e in self._entries.values())

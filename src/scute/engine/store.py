"""Compiled adapters in host memory, so that what vLLM evicts comes back without the disk."""

from collections.abc import Callable
from dataclasses import dataclass

from scute.admission.memory import GIB, machine_bytes
from scute.engine.packing import PackedAdapter
from scute.errors import Code, Refusal


def half_of_memory_gib() -> float:
    """Half of this machine's memory, in GiB."""
    return machine_bytes() / GIB / 2


@dataclass(frozen=True, slots=True)
class Entry:
    path: str
    packed: PackedAdapter


class HostStore:
    """Every admitted adapter, until it is removed: one that is dropped earlier would be read from disk in a step.

    The budget counts bytes of files, not of shards, so that every rank refuses the same adapters.
    """

    def __init__(self, budget_gib: float, on_drop: Callable[[int], None]) -> None:
        self._budget_gib = budget_gib
        self._on_drop = on_drop
        self._entries: dict[int, Entry] = {}

    @property
    def budget_bytes(self) -> int:
        return int(self._budget_gib * GIB)

    def check_fits(self, adapter_id: int, num_bytes: int) -> None:
        """Raises Refusal if an adapter of this size cannot be kept beside the others."""
        others = sum(e.packed.file_bytes for i, e in self._entries.items() if i != adapter_id)
        if others + num_bytes > self._budget_gib * GIB:
            raise Refusal(
                Code.CAPACITY_HOST,
                f"the files of all adapters would exceed host_memory_gib {self._budget_gib:.1f}; raise it in "
                "additional_config['scute'], or unload an adapter.",
            )

    def get(self, adapter_id: int, path: str) -> PackedAdapter | None:
        entry = self._entries.get(adapter_id)
        return None if entry is None or entry.path != path else entry.packed

    def adapters(self) -> dict[int, PackedAdapter]:
        """Every adapter by its id."""
        return {adapter_id: entry.packed for adapter_id, entry in self._entries.items()}

    def put(self, adapter_id: int, path: str, packed: PackedAdapter) -> None:
        """Add or replace an adapter."""
        self._entries[adapter_id] = Entry(path, packed)

    def drop(self, adapter_id: int) -> None:
        if self._entries.pop(adapter_id, None) is not None:
            self._on_drop(adapter_id)

    def paths_needing_base_weights(self) -> list[tuple[int, str]]:
        """(id, folder) of the adapters whose slots follow from base weights, in the order of admission."""
        return [(i, e.path) for i, e in self._entries.items() if e.packed.needs_base_weights]

"""What the adapters of an engine hold, and where: every rank tells it when it is asked, and nobody asks in a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scute.engine.model_manager import ScuteModelManager
    from scute.engine.packing import PackedAdapter


@dataclass(frozen=True, slots=True)
class Resident:
    """One admitted adapter.

    name: of the request that it was loaded for. rank: the largest of its factors, own or shared, 0 without any.
    disk_bytes: of its file. host_bytes: of its packed form, summed over the ranks; as many are in the arenas
    while it is active.
    """

    name: str
    method: str
    rank: int
    disk_bytes: int
    host_bytes: int
    is_active: bool
    is_pinned: bool

    @property
    def device_bytes(self) -> int:
        return self.host_bytes if self.is_active else 0


@dataclass(frozen=True, slots=True)
class Residency:
    """All admitted adapters by id.

    evictions: how often each lost its slot to another since the last report, by id. device_bytes: of all arenas;
    host_bytes: what the files of all adapters may come to.
    """

    adapters: Mapping[int, Resident]
    evictions: Mapping[int, int]
    device_bytes: int
    host_bytes: int


def report(manager: "ScuteModelManager", names: Mapping[int, str]) -> dict[str, Any]:
    """What one rank holds, in numbers and strings alone, which is what vLLM's messages between processes carry.

    names: of its adapters by id. It hands over the evictions and counts from zero again, so that whoever asks may add
    them up.
    """
    is_active, is_pinned = manager.is_active, manager.is_pinned
    adapters = [
        (i, names[i], p.method, _rank(manager, p), p.file_bytes, p.buffer.nbytes, is_active(i), is_pinned(i))
        for i, p in manager.store.adapters().items()
    ]
    return {
        "adapters": adapters,
        "evictions": list(manager.take_evictions().items()),
        "device_bytes": manager.arena.capacity_bytes,
        "host_bytes": manager.store.budget_bytes,
    }


def merge(reports: Sequence[Mapping[str, Any]]) -> Residency:
    """One engine from the reports of its ranks, the first of which counts the evictions."""
    adapters: dict[int, Resident] = {}
    for each in reports:
        for adapter_id, name, method, rank, disk, host, is_active, is_pinned in each["adapters"]:
            before = adapters.get(adapter_id)
            if before is not None:
                rank, host = max(rank, before.rank), host + before.host_bytes
            adapters[adapter_id] = Resident(name, method, rank, disk, host, is_active, is_pinned)
    return Residency(
        adapters=adapters,
        evictions=dict(reports[0]["evictions"]),
        device_bytes=sum(each["device_bytes"] for each in reports),
        host_bytes=reports[0]["host_bytes"],
    )


def _rank(manager: "ScuteModelManager", packed: "PackedAdapter") -> int:
    if packed.pair_key is None or manager.pairs is None:
        return packed.rank
    return max(packed.rank, int(manager.pairs.host_rank[manager.pairs.place_of(packed.pair_key)]))

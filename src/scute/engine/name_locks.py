"""A lock for every name that is being loaded; vLLM's table keeps one for ever for every name that anyone asked for."""

from asyncio import Lock
from weakref import WeakValueDictionary


class NameLocks:
    """In place of `defaultdict(Lock)`: a lock lives for as long as someone holds it or waits for it."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, Lock] = WeakValueDictionary()

    def __getitem__(self, name: str) -> Lock:
        return self._locks.setdefault(name, Lock())

    def __len__(self) -> int:
        return len(self._locks)

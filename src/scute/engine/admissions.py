"""What one engine client has had admitted, and the order in which requests and removals may leave for the engine."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from vllm.lora.request import LoRARequest

REMEMBERED = 1024
"""How many unloaded adapters are remembered; a request is queued long before that many others are unloaded."""


def taken_id(request: LoRARequest) -> ValueError:
    """What to raise where the id of an adapter is that of another one, which it does not replace."""
    return ValueError(
        f"lora_int_id {request.lora_int_id} is the id of another adapter; give {request.lora_name!r} an id of its own, "
        "or set load_inplace to replace it."
    )


class Admissions:
    """Of one client.

    A request that reaches the engine after the removal of its adapter would have it loaded in the middle of a step. So
    a removal waits for the requests that passed the gate before it, and later ones wait for the removal. Who waits may
    be cancelled, what is waited for may not: others wait for it too.

    A request whose prompt is a stream leaves piece by piece, and nobody knows when. Its adapter is removed once the
    stream has ended, and nobody waits for that.
    """

    def __init__(self) -> None:
        self.admitted: set[tuple[int, str]] = set()
        self._retired: deque[int] = deque(maxlen=REMEMBERED)
        self._leaving: dict[asyncio.Future[None], LoRARequest] = {}
        self._removals: dict[int, asyncio.Future[None]] = {}
        self._streams: dict[asyncio.Future[None], LoRARequest] = {}
        self.put_off: set[int] = set()

    @classmethod
    def of(cls, engine: Any) -> "Admissions":
        if not hasattr(engine, "_scute_admissions"):
            engine._scute_admissions = cls()
        found: Admissions = engine._scute_admissions
        return found

    def has(self, request: LoRARequest) -> bool:
        return (request.lora_int_id, request.lora_path) in self.admitted

    def check_id(self, request: LoRARequest) -> None:
        """Raises ValueError where the id is that of another adapter, or of one that the server has unloaded.

        Which of two adapters answered would depend on eviction.
        """
        if request.lora_int_id in self._retired:
            raise ValueError(f"The adapter {request.lora_name!r} was unloaded before the request was queued.")
        if request.lora_int_id in {adapter_id for adapter_id, _ in self.admitted}:
            raise taken_id(request)

    def remember(self, request: LoRARequest) -> None:
        self.forget(request.lora_int_id)
        self.admitted.add((request.lora_int_id, request.lora_path))

    def forget(self, adapter_id: int) -> None:
        self.admitted -= {key for key in self.admitted if key[0] == adapter_id}

    def recall(self, adapter_id: int) -> bool:
        """Whether a removal of the adapter was put off, which is forgotten: another takes its place."""
        is_put_off = adapter_id in self.put_off
        self.put_off.discard(adapter_id)
        return is_put_off

    def follow(self, stream: asyncio.Future[None], adapter: LoRARequest) -> None:
        """Put removals of the adapter off until the stream has ended."""
        self._streams[stream] = adapter

    def end(self, stream: asyncio.Future[None]) -> list[int]:
        """The adapters whose removal was put off until now; it may be recalled until it leaves for the engine."""
        del self._streams[stream]
        return [adapter_id for adapter_id in self.put_off if not self._is_streamed(adapter_id)]

    def put_off_removal(self, adapter_id: int) -> bool:
        """Whether the adapter is removed later, because a stream uses it. If not, it is removed now."""
        is_put_off = self._is_streamed(adapter_id)
        (self.put_off.add if is_put_off else self.put_off.discard)(adapter_id)
        return is_put_off

    def _is_streamed(self, adapter_id: int) -> bool:
        return any(adapter.lora_int_id == adapter_id for adapter in self._streams.values())

    def retire(self, adapter_id: int) -> None:
        """No request may have it admitted again: the server gives the next adapter another id."""
        self._retired.append(adapter_id)

    @asynccontextmanager
    async def leaving(self, adapter: LoRARequest) -> AsyncIterator[None]:
        """Around a request of the adapter, until it has left for the engine.

        The server may point the adapter to a new version meanwhile: the request leaves with the id of that moment.
        """
        while adapter.lora_int_id in self._removals:
            await asyncio.shield(self._removals[adapter.lora_int_id])
        left = asyncio.get_running_loop().create_future()
        self._leaving[left] = adapter
        try:
            yield
        finally:
            del self._leaving[left]
            left.set_result(None)

    @asynccontextmanager
    async def removing(self, adapter_id: int) -> AsyncIterator[bool]:
        """Around the removal of the adapter. Whether it is due still: one that was put off may be recalled."""
        was_put_off = adapter_id in self.put_off

        def is_due() -> bool:
            return adapter_id in self.put_off or not was_put_off

        while adapter_id in self._removals:
            await asyncio.shield(self._removals[adapter_id])
        removed = self._removals[adapter_id] = asyncio.get_running_loop().create_future()
        try:
            if is_due():
                self.forget(adapter_id)
            for left in [left for left, adapter in self._leaving.items() if adapter.lora_int_id == adapter_id]:
                await asyncio.shield(left)
            if is_due():
                self.forget(adapter_id)  # one of them may have had it admitted
            yield is_due()
        finally:
            del self._removals[adapter_id]
            removed.set_result(None)

"""What the API server and the engine client share while the server loads one adapter."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from vllm.lora.request import LoRARequest

from scute.errors import Refusal


@dataclass
class Load:
    """models: the server's list of adapters; replaced: the one whose name the new one takes.

    error: why it failed; refusal: the one that it is or carries.
    """

    models: Any
    replaced: LoRARequest | None = None
    error: Exception | None = None
    refusal: Refusal | None = None

    def number(self, request: LoRARequest) -> None:
        """Give the new version of an adapter an id of its own: requests that run keep the weights they began with.

        vLLM calls this way with the lock of the name held.
        """
        self.replaced = self.models.lora_requests.get(request.lora_name)
        if self.replaced is not None:
            request.lora_int_id = self.models.lora_id_counter.inc(1)
        request.load_inplace = False  # vLLM 0.32 leaves it set: every step of a later request would load it again


_current: ContextVar[Load | None] = ContextVar("scute_load", default=None)


def current() -> Load | None:
    """The load that this task is in, if it came from the server."""
    return _current.get()


@contextmanager
def begin(models: Any) -> Iterator[Load]:
    load = Load(models)
    token = _current.set(load)
    try:
        yield load
    finally:
        _current.reset(token)

"""An adapter stays as it is while requests use it; only the engine core knows all of them.

A worker sees the adapters of one step: those of requests that wait or were preempted are in use all the same. What is
removed goes with the step that ends the last of them. What is loaded in its place has an id of its own inside the
engine until then, which a request gets when it is queued; clients know nothing of it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from vllm.lora.request import LoRARequest

from scute.engine.admissions import taken_id

LAST_ID = 2**31 - 1
"""Ids of the engine's own count down from here: vLLM's arrays hold 32 bits."""

Call = Callable[..., Any]


@dataclass(slots=True)
class _Adapters:
    """Of one engine core.

    loaded: what the id of a client stands for, under its id in the engine. removed: ids in the engine that are removed
    as soon as no request uses them.
    """

    loaded: dict[int, LoRARequest] = field(default_factory=dict)
    removed: set[int] = field(default_factory=set)

    def own_id(self, client_id: int) -> int:
        found = self.loaded.get(client_id)
        return client_id if found is None else found.lora_int_id

    def client_ids(self) -> dict[int, int]:
        """By id in the engine."""
        return {request.lora_int_id: client_id for client_id, request in self.loaded.items()}


def add_beside_used(add_lora: Call, remove_lora: Call) -> Call:
    """Of `EngineCore`: what is loaded in the place of an adapter that requests use is another adapter.

    One that is loaded already stays as it is, unless it is loaded in place. Raises ValueError for an id of another.
    """

    @functools.wraps(add_lora)  # vLLM decodes the arguments of a call by their annotations
    def add(self: Any, lora_request: LoRARequest) -> Any:
        _finish(self, remove_lora)
        adapters, client_id = _of(self), lora_request.lora_int_id
        old = adapters.loaded.get(client_id)
        if old is not None and not lora_request.load_inplace:
            if old.lora_path != lora_request.lora_path:
                raise taken_id(lora_request)
            return add_lora(self, old)
        if old is None and client_id in adapters.client_ids():
            raise taken_id(lora_request)
        old_id = new_id = adapters.own_id(client_id)
        if _is_used(self, old_id):
            new_id = next(_free_ids(self))
            # from its folder, whatever a worker keeps under an id that others had before
            lora_request = msgspec.structs.replace(lora_request, load_inplace=True)
        try:
            result = add_lora(self, msgspec.structs.replace(lora_request, lora_int_id=new_id))
            if old is not None and new_id != old_id:
                self.collective_rpc("scute_move_pin", args=(old_id, new_id))
        except Exception:
            if old is None or new_id != old_id:
                with contextlib.suppress(Exception):
                    remove_lora(self, new_id)  # some ranks may have admitted it
            raise
        if new_id != old_id:
            adapters.removed.add(old_id)
        adapters.loaded[client_id] = msgspec.structs.replace(lora_request, lora_int_id=new_id, load_inplace=False)
        return result

    return add


def remove_when_unused(remove_lora: Call) -> Call:
    """Of `EngineCore`: put off while the adapter is in use, until a step or a call after its last request."""

    @functools.wraps(remove_lora)
    def remove(self: Any, lora_id: int) -> Any:
        _finish(self, remove_lora)
        own_id = _of(self).own_id(lora_id)
        _of(self).loaded.pop(lora_id, None)
        if _is_used(self, own_id):
            _of(self).removed.add(own_id)
            return True
        return remove_lora(self, own_id)

    return remove


def list_loaded(list_loras: Call, remove_lora: Call) -> Call:
    """Of `EngineCore`: by the ids of clients, without those whose removal was put off."""

    @functools.wraps(list_loras)
    def listed(self: Any) -> Any:
        _finish(self, remove_lora)
        client_ids = _of(self).client_ids()
        return {client_ids.get(own_id, own_id) for own_id in list_loras(self) - _of(self).removed}

    return listed


def pin_loaded(pin_lora: Call) -> Call:
    """Of `EngineCore`: by the id of a client."""

    @functools.wraps(pin_lora)
    def pin(self: Any, lora_id: int) -> Any:
        return pin_lora(self, _of(self).own_id(lora_id))

    return pin


def make_with_loaded(preprocess_add_request: Call) -> Call:
    """Of `EngineCore`: what is loaded under the id that a request asks for. It may change before it is queued."""

    @functools.wraps(preprocess_add_request)
    def making(self: Any, request: Any) -> Any:
        client_id = 0 if request.lora_request is None else request.lora_request.lora_int_id
        found = _of(self).loaded.get(client_id)
        made, wave = preprocess_add_request(
            self, request if found is None else msgspec.structs.replace(request, lora_request=found)
        )
        made.scute_client_id = client_id
        return made, wave

    return making


def queue_with_loaded(add_request: Call) -> Call:
    """Of `EngineCore`: what is loaded now, to which a request keeps from here on. Another thread has made it."""

    @functools.wraps(add_request)
    def queue(self: Any, request: Any, request_wave: int = 0) -> Any:
        found = _of(self).loaded.get(getattr(request, "scute_client_id", 0))
        if found is not None and found is not request.lora_request:
            request.lora_request = found
            request.block_hashes.clear()  # they are of the adapter too
            request.update_block_hashes()
        return add_request(self, request, request_wave)

    return queue


def finish_after_steps(post_step: Call, remove_lora: Call) -> Call:
    """Of `EngineCore`: requests end in steps, and one that is aborted is told to the workers in a step."""

    @functools.wraps(post_step)
    def finishing(self: Any, model_executed: bool) -> Any:
        result = post_step(self, model_executed)
        _finish(self, remove_lora)
        return result

    return finishing


def _finish(core: Any, remove_lora: Call) -> None:
    removed = _of(core).removed
    for own_id in [i for i in removed if not _is_used(core, i)]:
        removed.discard(own_id)
        remove_lora(core, own_id)


def _of(core: Any) -> _Adapters:
    adapters: _Adapters = core.__dict__.setdefault("_scute_adapters", _Adapters())
    return adapters


def _free_ids(core: Any) -> Iterator[int]:
    adapters = _of(core)
    taken = adapters.removed.union(adapters.loaded, adapters.client_ids())
    return (i for i in range(LAST_ID, 0, -1) if i not in taken)


def _is_used(core: Any, own_id: int) -> bool:
    requests = core.scheduler.requests.values()
    return any(r.lora_request is not None and r.lora_request.lora_int_id == own_id for r in requests)

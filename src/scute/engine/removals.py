"""An adapter that is removed stays for as long as requests use it; only the engine core knows all of them.

A worker sees the adapters of one step: those of requests that wait or were preempted are in use all the same.
"""

import functools
from collections.abc import Callable
from typing import Any

import msgspec

Call = Callable[..., Any]


def remove_when_unused(remove_lora: Call) -> Call:
    """Of `EngineCore`: put off while the adapter is in use, until a step or a call after its last request."""

    @functools.wraps(remove_lora)
    def remove(self: Any, lora_id: int) -> Any:
        _finish(self, remove_lora)
        if _is_used(self, lora_id):
            _waiting(self).add(lora_id)
            return True
        return remove_lora(self, lora_id)

    return remove


def add_after_removals(add_lora: Call, remove_lora: Call) -> Call:
    """Of `EngineCore`: what was removed and is no longer used makes room first."""

    @functools.wraps(add_lora)  # vLLM decodes the arguments of a call by their annotations
    def add(self: Any, lora_request: Any) -> Any:
        _finish(self, remove_lora)
        if lora_request.lora_int_id in _waiting(self):  # the folder may be another, though the old one is there still
            _waiting(self).discard(lora_request.lora_int_id)
            lora_request = msgspec.structs.replace(lora_request, load_inplace=True)
        return add_lora(self, lora_request)

    return add


def list_after_removals(list_loras: Call, remove_lora: Call) -> Call:
    """Of `EngineCore`: without those whose removal was put off."""

    @functools.wraps(list_loras)
    def listed(self: Any) -> Any:
        _finish(self, remove_lora)
        return list_loras(self) - _waiting(self)

    return listed


def finish_after_steps(post_step: Call, remove_lora: Call) -> Call:
    """Of `EngineCore`: requests end in steps, and one that is aborted is told to the workers in a step."""

    @functools.wraps(post_step)
    def finishing(self: Any, model_executed: bool) -> Any:
        result = post_step(self, model_executed)
        _finish(self, remove_lora)
        return result

    return finishing


def _finish(core: Any, remove_lora: Call) -> None:
    for lora_id in [i for i in _waiting(core) if not _is_used(core, i)]:
        _waiting(core).discard(lora_id)
        remove_lora(core, lora_id)


def _waiting(core: Any) -> set[int]:
    waiting: set[int] = core.__dict__.setdefault("_scute_waiting", set())
    return waiting


def _is_used(core: Any, lora_id: int) -> bool:
    requests = core.scheduler.requests.values()
    return any(r.lora_request is not None and r.lora_request.lora_int_id == lora_id for r in requests)

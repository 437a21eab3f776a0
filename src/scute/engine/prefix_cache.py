"""Keeps cached prefixes of one adapter from answering for the next one under the same name and path.

vLLM keys a prefix on the adapter's name and path. An adapter that is removed and loaded again, or replaced, may hold
other weights by then: its prefixes are counted by loads. Requests that run when another adapter takes their adapter's
place keep its id in the engine (`removals`), and so its prefixes.

A first load keeps vLLM's own keys. Only so many adapters are counted one by one: every load of any other, the first one
too, has keys that no load before it had.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

FIRST = 1

MOST_COUNTED = 2**14

_loads: Counter[tuple[str, str]] = Counter()
"""How often this process's engine loaded an adapter, by name and path."""

_others = itertools.count(FIRST + 1)
"""Numbers of the loads of adapters that are not counted one by one."""

_versions: dict[int, int] = {}
"""Which load is the one of an id in the engine."""


def bind() -> None:
    """Wrap the engine core and the hash of its blocks."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.engine.core import EngineCore

    EngineCore.add_lora = count_loads(EngineCore.add_lora)
    EngineCore.remove_lora = forget_version(EngineCore.remove_lora)
    kv_cache_utils._gen_lora_extra_hash_keys = with_version(kv_cache_utils._gen_lora_extra_hash_keys)


def count_loads(add_lora: Callable[..., Any]) -> Callable[..., Any]:
    """A call for an adapter that is there is no load."""

    @functools.wraps(add_lora)
    def counting(self: Any, lora_request: Any) -> Any:
        result = add_lora(self, lora_request)
        if lora_request.load_inplace or lora_request.lora_int_id not in _versions:
            _versions[lora_request.lora_int_id] = _number_of((lora_request.lora_name, lora_request.lora_path))
        return result

    return counting


def _number_of(name: tuple[str, str]) -> int:
    if name not in _loads and len(_loads) >= MOST_COUNTED:
        return next(_others)
    _loads[name] += 1
    return _loads[name]


def forget_version(remove_lora: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(remove_lora)
    def forgetting(self: Any, lora_id: int) -> Any:
        _versions.pop(lora_id, None)
        return remove_lora(self, lora_id)

    return forgetting


def with_version(generate_keys: Callable[..., Any]) -> Callable[..., Any]:
    """An adapter that is not known shares prefixes with nobody."""

    @functools.wraps(generate_keys)
    def generating(request: Any) -> Any:
        keys = generate_keys(request)
        version = _versions.get(request.lora_request.lora_int_id, request.request_id) if keys else FIRST
        return keys if version == FIRST else [(*key, version) for key in keys]

    return generating

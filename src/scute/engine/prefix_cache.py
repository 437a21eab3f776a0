"""Keeps cached prefixes of one adapter from answering for the next one under the same name and path.

vLLM keys a prefix on the adapter's name and path. An adapter that is removed and loaded again, or replaced, may hold
other weights by then: its prefixes are counted by loads, of which a call for an adapter that is there is none. A
request keeps the count that it arrived with, so that what it computes on the old weights is never found by one that
runs on the new.
"""

import functools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

Source = tuple[str, str]
"""The name and the path of an adapter."""

_loads: Counter[Source] = Counter()
"""How often this process's engine loaded an adapter."""

_loaded: dict[int, tuple[Source, int]] = {}
"""What an id stands for, and which load of it."""


def bind() -> None:
    """Wrap the engine core and the hash of its blocks, in the processes that have an engine core."""
    if "vllm.v1.engine.core" not in sys.modules:
        return
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.engine.core import EngineCore

    EngineCore.add_lora = count_loads(EngineCore.add_lora)
    EngineCore.remove_lora = forget_version(EngineCore.remove_lora)
    EngineCore.preprocess_add_request = keep_version(EngineCore.preprocess_add_request)
    kv_cache_utils._gen_lora_extra_hash_keys = with_version(kv_cache_utils._gen_lora_extra_hash_keys)


def count_loads(add_lora: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(add_lora)
    def counting(self: Any, lora_request: Any) -> Any:
        result = add_lora(self, lora_request)
        source, adapter_id = (lora_request.lora_name, lora_request.lora_path), lora_request.lora_int_id
        if lora_request.load_inplace or adapter_id not in _loaded or _loaded[adapter_id][0] != source:
            _loads[source] += 1
            _loaded[adapter_id] = source, _loads[source]
        return result

    return counting


def forget_version(remove_lora: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(remove_lora)
    def forgetting(self: Any, lora_id: int) -> Any:
        _loaded.pop(lora_id, None)
        return remove_lora(self, lora_id)

    return forgetting


def keep_version(preprocess: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(preprocess)
    def keeping(self: Any, request: Any) -> Any:
        made, wave = preprocess(self, request)
        made.scute_version = _version_of(made)
        return made, wave

    return keeping


def with_version(generate_keys: Callable[..., Any]) -> Callable[..., Any]:
    """A first load keeps vLLM's own keys."""

    @functools.wraps(generate_keys)
    def generating(request: Any) -> Any:
        keys = generate_keys(request)
        version = _version_of(request) if keys else 1
        return keys if version == 1 else [(*key, version) for key in keys]

    return generating


def _version_of(request: Any) -> int | str:
    """The name of the request itself where its adapter is not known: then it shares prefixes with nobody."""
    kept: int | str | None = getattr(request, "scute_version", None)
    if kept is not None or request.lora_request is None:
        return kept or 1
    loaded = _loaded.get(request.lora_request.lora_int_id)
    return request.request_id if loaded is None else loaded[1]

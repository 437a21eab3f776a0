"""Keeps cached prefixes of one adapter from answering for the next one under the same name and path.

vLLM keys a prefix on the adapter's name and path. An adapter that is removed and loaded again, or replaced in place,
may hold other weights by then: its prefixes are counted by loads.
"""

import functools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

_loads: Counter[tuple[str, str]] = Counter()
"""How often this process's engine loaded an adapter, by name and path."""


def bind() -> None:
    """Wrap the engine core and the hash of its blocks, in the processes that have an engine core."""
    if "vllm.v1.engine.core" not in sys.modules:
        return
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.engine.core import EngineCore

    EngineCore.add_lora = count_loads(EngineCore.add_lora)
    kv_cache_utils._gen_lora_extra_hash_keys = with_loads(kv_cache_utils._gen_lora_extra_hash_keys)


def count_loads(add_lora: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(add_lora)
    def counting(self: Any, lora_request: Any) -> Any:
        result = add_lora(self, lora_request)
        _loads[lora_request.lora_name, lora_request.lora_path] += 1
        return result

    return counting


def with_loads(generate_keys: Callable[..., Any]) -> Callable[..., Any]:
    """A first load keeps vLLM's own keys."""

    @functools.wraps(generate_keys)
    def generating(request: Any) -> Any:
        keys = generate_keys(request)
        loads = _loads[request.lora_request.lora_name, request.lora_request.lora_path] if keys else 0
        return [(*head, f"{path}#{loads}") for *head, path in keys] if loads > 1 else keys

    return generating

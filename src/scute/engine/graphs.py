"""CUDA graphs keyed on which routes are live, for vLLM's V2 model runner.

A captured graph replays the same kernels for every batch. vLLM keys its graphs on a number of active adapters; Scute
makes it mean a set of routes instead: 0 for a batch of base rows, `max_loras + 1 + routes` for low-rank terms and
vectors with these `Routes` beside them. A batch without VeRA and OFT so replays a graph without their kernels.
"""

from collections.abc import Callable
from enum import IntFlag
from typing import Any

from vllm.config import get_current_vllm_config_or_none

from scute.engine.options import Options

NO_ADAPTERS = 0


class Routes(IntFlag):
    """What an adapter needs beside low-rank terms and vectors."""

    NONE = 0
    SHARED = 1
    ROTATION = 2
    EVERY = 3


def case_of(max_loras: int, routes: int) -> int:
    return max_loras + 1 + routes


def bind() -> None:
    """Rebind the three names in the V2 runner's module; vLLM dispatches on them opaquely."""
    import vllm.v1.worker.gpu.model_runner as runner_module

    original_hook = runner_module.create_lora_capture_hook
    runner_module.get_lora_capture_cases = capture_cases
    runner_module.get_num_active_loras_for_dispatch = case_for_dispatch
    runner_module.create_lora_capture_hook = lambda config, runner: capture_hook(config, runner, original_hook)


def capture_cases(lora_config: Any, compilation_config: Any) -> list[int]:  # noqa: ARG001
    """The largest first: vLLM estimates the memory of all graphs from the first it captures."""
    if lora_config is None:
        return [NO_ADAPTERS]
    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is not None:
        _allow(Options.read(vllm_config))
    combinations = sorted({routes & _served for routes in range(Routes.EVERY + 1)}, reverse=True)
    return [*(case_of(lora_config.max_loras, routes) for routes in combinations), NO_ADAPTERS]


def case_for_dispatch(lora_config: Any, lora_state: Any, req_ids: list[str], dummy_run: bool) -> int:
    """Case of a batch; decided before its adapters are loaded, so an adapter not seen yet means every route."""
    if not lora_config:
        return NO_ADAPTERS
    if dummy_run:
        return case_of(lora_config.max_loras, _served)
    adapters = lora_state.get_activate_loras(req_ids)
    if not adapters:
        return NO_ADAPTERS
    routes = 0
    for adapter in adapters:
        # One that is loaded in place may need other routes than it did.
        routes |= _served if adapter.load_inplace else routes_of(adapter.lora_int_id)
    return case_of(lora_config.max_loras, routes)


_served = int(Routes.EVERY)
"""The routes that the options of this process's engine leave on."""

_routes: dict[int, int] = {}
"""The routes of the adapters of this process's engine, by id."""


def _allow(options: Options) -> None:
    global _served
    shared, rotation = options.shared_pairs > 0, options.rotation_width > 0
    _served = Routes.SHARED * shared | Routes.ROTATION * rotation


def routes_of(adapter_id: int) -> int:
    return _routes.get(adapter_id, _served)


def record(adapter_id: int, *, shared: bool, rotation: bool) -> None:
    """Called when an adapter is admitted."""
    _routes[adapter_id] = Routes.SHARED * shared | Routes.ROTATION * rotation


def forget(adapter_id: int) -> None:
    _routes.pop(adapter_id, None)


def capture_hook(lora_config: Any, runner: Any, original: Callable[..., Any]) -> Callable[[int, int, int], None] | None:
    """vLLM's hook, which makes a batch of dummy adapters, then the routes of the case that is captured."""
    hook = original(lora_config, runner)
    if hook is None:
        return None

    def with_routes(num_active_loras: int, num_reqs: int, num_tokens: int) -> None:
        hook(num_active_loras, num_reqs, num_tokens)
        if num_active_loras:
            routes = num_active_loras - case_of(lora_config.max_loras, Routes.NONE)
            shared, rotation = bool(routes & Routes.SHARED), bool(routes & Routes.ROTATION)
            runner.lora_manager.force_routes(shared=shared, rotation=rotation)

    return with_routes

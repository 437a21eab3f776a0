"""CUDA graphs keyed on which routes are live, for vLLM's V2 model runner.

A captured graph replays the same kernels for every batch. vLLM keys its graphs on a number of active adapters; Scute
makes it mean a set of routes instead: 0 for a batch of base rows, `max_loras + 1` for low-rank terms and vectors
only, `max_loras + 2` for every route. A batch without VeRA and OFT so replays a graph in which the base GEMM is
vLLM's own.
"""

from collections.abc import Callable
from typing import Any

NO_ADAPTERS = 0


def low_rank_case(max_loras: int) -> int:
    return max_loras + 1


def all_routes_case(max_loras: int) -> int:
    return max_loras + 2


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
    return [all_routes_case(lora_config.max_loras), low_rank_case(lora_config.max_loras), NO_ADAPTERS]


def case_for_dispatch(lora_config: Any, lora_state: Any, req_ids: list[str], dummy_run: bool) -> int:
    """Case of a batch; decided before its adapters are loaded, so an adapter not seen yet means every route."""
    if not lora_config:
        return NO_ADAPTERS
    if dummy_run:
        return all_routes_case(lora_config.max_loras)
    adapters = lora_state.get_activate_loras(req_ids)
    if not adapters:
        return NO_ADAPTERS
    if any(needs_every_route(a.lora_int_id) for a in adapters):
        return all_routes_case(lora_config.max_loras)
    return low_rank_case(lora_config.max_loras)


_low_rank_only: set[int] = set()
"""Ids of the adapters of this process's engine that use neither shared factors nor an input transform."""


def needs_every_route(adapter_id: int) -> bool:
    return adapter_id not in _low_rank_only


def record(adapter_id: int, low_rank_only: bool) -> None:
    """Called when an adapter is admitted."""
    (_low_rank_only.add if low_rank_only else _low_rank_only.discard)(adapter_id)


def forget(adapter_id: int) -> None:
    _low_rank_only.discard(adapter_id)


def capture_hook(lora_config: Any, runner: Any, original: Callable[..., Any]) -> Callable[[int, int, int], None] | None:
    """vLLM's hook, which makes a batch of dummy adapters, then the routes of the case that is captured."""
    hook = original(lora_config, runner)
    if hook is None:
        return None

    def with_routes(num_active_loras: int, num_reqs: int, num_tokens: int) -> None:
        hook(num_active_loras, num_reqs, num_tokens)
        if num_active_loras:
            every = num_active_loras == all_routes_case(lora_config.max_loras)
            runner.lora_manager.force_routes(shared=every, rotation=every)

    return with_routes

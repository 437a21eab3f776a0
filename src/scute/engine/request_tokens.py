"""The tokens of every adapter, without a line of work in a step: vLLM counts them by request.

vLLM's front end keeps how many tokens each running request has. They are read when a request ends, aborted or not,
and of the running ones whenever somebody asks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.v1.metrics.stats import LoRARequestStates

Count = Callable[[str, int, int], None]
"""Takes the name of an adapter, and how many more prompt and generated tokens there are."""


@dataclass(slots=True)
class _Running:
    state: Any
    prompt_tokens: int = 0
    generation_tokens: int = 0


class CountedRequests(LoRARequestStates):
    """vLLM's record of which adapters run, which is told of every request's start and end."""

    def __init__(self, states: Mapping[str, Any], count: Count) -> None:
        """states: vLLM's request states by id."""
        super().__init__(log_stats=True)
        self._states = states
        self._count = count
        self._running: dict[str, _Running] = {}

    def request_running(self, req_id: str, lora_name: str | None) -> None:
        super().request_running(req_id, lora_name)
        if lora_name is not None and req_id not in self._running and req_id in self._states:
            self._running[req_id] = _Running(self._states[req_id])

    def request_finished(self, req_id: str, lora_name: str | None) -> None:
        super().request_finished(req_id, lora_name)
        running = self._running.pop(req_id, None)
        if running is not None:
            self._add_new(running)

    def count_running(self) -> None:
        """Count what the requests that run have by now."""
        for running in self._running.values():
            self._add_new(running)

    def names(self) -> set[str]:
        """Adapters with a request that runs."""
        return {running.state.lora_name for running in self._running.values()}

    def _add_new(self, running: _Running) -> None:
        state = running.state
        # A request whose prompt comes in pieces prefills again; what was counted of it stays.
        prompt = running.prompt_tokens if state.is_prefilling else state.prompt_len
        generated = state.stats.num_generation_tokens
        self._count(state.lora_name, prompt - running.prompt_tokens, generated - running.generation_tokens)
        running.prompt_tokens, running.generation_tokens = prompt, generated

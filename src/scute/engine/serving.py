"""The API server's part: refusals become HTTP 400, and unloading an adapter reaches the engine."""

import asyncio
import functools
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from vllm.logger import init_logger

from scute.engine.refusals import find_refusal
from scute.engine.stack_names import with_paths
from scute.errors import Code

logger = init_logger("vllm.scute")

POLL_SECONDS = 0.1

_removals: set[asyncio.Task[None]] = set()
"""Removals that wait for running requests; the event loop itself keeps only weak references to tasks."""


def answer_refusals(load_lora_adapter: Callable[..., Any]) -> Callable[..., Any]:
    """400 with the sentence where vLLM answers 500; a folder that is not there keeps vLLM's 404.

    A stack may name adapters that are loaded.
    """

    @functools.wraps(load_lora_adapter)
    async def answering(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = args[0] if args else kwargs["request"]
        request.lora_path = with_paths(request.lora_path, self.lora_requests)
        result = await load_lora_adapter(self, *args, **kwargs)
        stored = self.lora_requests.get(request.lora_name)
        if stored is not None:
            stored.load_inplace = False  # vLLM leaves it set: every step of a later request would load the folder again
        error = getattr(result, "error", None)
        refusal = None if error is None else find_refusal(error.message)
        if error is not None and refusal is not None:
            is_missing = refusal.code is Code.FOLDER_MISSING
            error.message = f"{refusal} (adapter {request.lora_name!r})"
            error.type = "NotFoundError" if is_missing else "BadRequestError"
            error.code = (HTTPStatus.NOT_FOUND if is_missing else HTTPStatus.BAD_REQUEST).value
        return result

    return answering


def release_unloaded(unload_lora_adapter: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM only forgets the name: also remove the adapter from the engine, once no request runs on it."""

    @functools.wraps(unload_lora_adapter)
    async def releasing(self: Any, request: Any) -> Any:
        adapter = self.lora_requests.get(request.lora_name)
        result = await unload_lora_adapter(self, request)
        if adapter is not None and request.lora_name not in self.lora_requests:
            task = asyncio.create_task(_remove_when_idle(self.engine_client, adapter.lora_int_id))
            _removals.add(task)
            task.add_done_callback(_finish)
        return result

    return releasing


async def _remove_when_idle(client: Any, adapter_id: int) -> None:
    idle_polls = 0
    while idle_polls < 2:  # the abort of a request that is gone here may still be on its way to the engine
        await asyncio.sleep(POLL_SECONDS)
        idle_polls = 0 if _is_running(client, adapter_id) else idle_polls + 1
    await client.remove_lora(adapter_id)


def _finish(task: asyncio.Task[None]) -> None:
    _removals.discard(task)
    if not task.cancelled() and task.exception() is not None:
        logger.error("An unloaded adapter was not removed from the engine", exc_info=task.exception())


def _is_running(client: Any, adapter_id: int) -> bool:
    states = client.output_processor.request_states.values()
    return any(s.lora_request is not None and s.lora_request.lora_int_id == adapter_id for s in states)

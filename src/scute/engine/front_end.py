"""The front end's part: admit an adapter before its first request is queued, and say why it was refused.

vLLM loads an adapter it has not seen in the middle of a step, where an error ends the engine. Admitting it by the
`add_lora` call first makes the error the caller's. Most errors are found before that call, in this process: vLLM
logs an error of a worker as if it had crashed.
"""

import asyncio
import contextlib
import functools
import inspect
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from vllm.lora.request import LoRARequest
from vllm.v1.engine.exceptions import EngineDeadError

from scute.engine import loads, upstream
from scute.engine.admissions import Admissions
from scute.engine.base import check_folder
from scute.engine.checks import check_config
from scute.engine.options import Options
from scute.engine.refusals import find_refusal
from scute.engine.sources import check_text

_CLIENTS = frozenset(
    {
        "vllm.v1.engine.llm_engine",
        "vllm.v1.engine.async_llm",
        "vllm.entrypoints.openai.api_server",
        "vllm.entrypoints.openai.models.serving",  # all that one of several API servers has by the time of plugins
    }
)

_REMOVING: set[asyncio.Future[None]] = set()
"""Removals that nobody waits for; asyncio itself keeps no task alive."""


def is_front_end() -> bool:
    """Whether this is the first process, or a child that has imported a client: an API server, or a script's worker."""
    return multiprocessing.parent_process() is None or not _CLIENTS.isdisjoint(sys.modules)


def bind() -> None:
    """Wrap the engine clients, in a process that is a front end."""
    upstream.check_signatures(upstream.FRONT_END_SIGNATURES)
    upstream.check_uses(upstream.FRONT_END_USES)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.engine.llm_engine import LLMEngine

    EngineArgs.create_engine_config = _check_config(EngineArgs.create_engine_config)
    LLMEngine.add_request = _admit_first(LLMEngine.add_request)
    LLMEngine.add_lora = _remember_admission(LLMEngine.add_lora)
    LLMEngine.remove_lora = _forget_admission(LLMEngine.remove_lora)
    AsyncLLM.add_request = _admit_first_async(AsyncLLM.add_request)
    AsyncLLM.add_lora = _remember_admission_async(AsyncLLM.add_lora)
    AsyncLLM.remove_lora = _forget_admission_async(AsyncLLM.remove_lora)
    AsyncLLM.list_loras = _list_kept(AsyncLLM.list_loras)
    AsyncMPClient._ensure_output_queue_task = _fail_unanswered(AsyncMPClient._ensure_output_queue_task)


def _check_config(create_engine_config: Callable[..., Any]) -> Callable[..., Any]:
    """A worker would say it too, but far above the last message of the engine."""

    @functools.wraps(create_engine_config)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = create_engine_config(self, *args, **kwargs)
        if config.lora_config is not None:
            Options.read(config)
            check_config(config)
        return config

    return checked


def _adapter_of(engine: Any, bound: inspect.BoundArguments) -> LoRARequest | None:
    """The adapter of an `add_request` call, where the engine serves any."""
    given = bound.arguments
    request = given.get("lora_request") or getattr(given.get("prompt"), "lora_request", None)
    return None if engine.vllm_config.lora_config is None else request


def _is_new(engine: Any, request: LoRARequest) -> bool:
    """Whether the engine has to admit the adapter first.

    Raises ValueError where it cannot have the adapter's id, and Refusal for a name that cannot be sent to it.
    """
    check_text("lora_name", request.lora_name)
    if request.load_inplace:
        return True
    admissions = Admissions.of(engine)
    if admissions.has(request):
        return False
    admissions.check_id(request)
    return True


def _as_loaded(bound: inspect.BoundArguments) -> inspect.BoundArguments:
    """The call without `load_inplace`: a step that finds it would read the folder again, every time."""
    request, prompt = bound.arguments.get("lora_request"), bound.arguments.get("prompt")
    if request is not None and request.load_inplace:
        bound.arguments["lora_request"] = msgspec.structs.replace(request, load_inplace=False)
    if prompt is not None and getattr(prompt, "lora_request", None) is not None:
        prompt.lora_request = msgspec.structs.replace(prompt.lora_request, load_inplace=False)
    return bound


def _admit_first(add_request: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(add_request)

    @functools.wraps(add_request)
    def gated(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        adapter = _adapter_of(self, bound)
        if adapter is not None and _is_new(self, adapter):
            self.add_lora(adapter)
            bound = _as_loaded(bound)
        return add_request(*bound.args, **bound.kwargs)

    return gated


def _admit_first_async(add_request: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(add_request)

    @functools.wraps(add_request)
    async def gated(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        adapter = _adapter_of(self, bound)
        if adapter is None:
            return await add_request(*bound.args, **bound.kwargs)
        async with Admissions.of(self).leaving(adapter):
            if _is_new(self, adapter):
                with _refusals():
                    await self.add_lora(adapter)
                bound = _as_loaded(bound)
            queue = await add_request(*bound.args, **bound.kwargs)
            stream = getattr(queue, "_input_stream_task", None)
            if stream is not None:
                _follow(self, stream, adapter)
            return queue

    return gated


def _follow(engine: Any, stream: asyncio.Future[None], adapter: LoRARequest) -> None:
    """Of a request whose prompt is a stream, and the task that sends it: keep its adapter until it has ended."""

    def ended(stream: asyncio.Future[None]) -> None:
        for adapter_id in Admissions.of(engine).end(stream):
            _remove_alone(engine, adapter_id, if_put_off=True)

    Admissions.of(engine).follow(stream, adapter)
    stream.add_done_callback(ended)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Turn the engine's error back into the refusal that it carries."""
    try:
        yield
    except Exception as error:
        refusal = find_refusal(str(error))
        if refusal is None:
            raise
        raise refusal from error


def _remember_admission(add_lora: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(add_lora)
    def remembering(self: Any, lora_request: LoRARequest) -> Any:
        if _is_new(self, lora_request):
            check_folder(self.vllm_config, lora_request.lora_path)
        with _refusals():
            result = add_lora(self, lora_request)
        _note(self, lora_request)
        return result

    return remembering


def _remember_admission_async(add_lora: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(add_lora)
    async def remembering(self: Any, lora_request: LoRARequest) -> Any:
        load = loads.current()
        if load is not None:
            load.number(lora_request)
        try:
            if _is_new(self, lora_request):
                await asyncio.to_thread(check_folder, self.vllm_config, lora_request.lora_path)
            result = await _load(self, lora_request, add_lora)
        except Exception as error:
            if load is not None:
                load.error, load.refusal = error, find_refusal(str(error))
            raise
        _note(self, lora_request)
        return result

    return remembering


def _note(engine: Any, request: LoRARequest) -> None:
    Admissions.of(engine).remember(request)
    request.load_inplace = False  # whoever keeps it would have every later request load the folder again


async def _load(engine: Any, request: LoRARequest, add_lora: Callable[..., Any]) -> Any:
    """The engine finishes a load whose caller is gone: then the adapter is removed, or it would stay."""
    admissions = Admissions.of(engine)
    is_put_off = admissions.recall(request.lora_int_id)
    request.load_inplace |= is_put_off  # the folder may be another, though the old one is there still
    loading = asyncio.ensure_future(add_lora(engine, request))
    try:
        return await asyncio.shield(loading)
    except asyncio.CancelledError:
        if not admissions.has(request):
            _remove_alone(engine, request.lora_int_id, after=loading)
        raise
    except Exception:
        if is_put_off:
            admissions.put_off.add(request.lora_int_id)
            _remove_alone(engine, request.lora_int_id, if_put_off=True)
        raise


def _remove_alone(
    engine: Any, adapter_id: int, *, after: asyncio.Future[Any] | None = None, if_put_off: bool = False
) -> None:
    """Remove an adapter while nobody waits. after: its load; of one that failed there is nothing to remove.

    if_put_off: unless the removal is recalled before it leaves, because another adapter takes the place.
    """

    async def remove() -> None:
        with contextlib.suppress(Exception):
            if after is not None:
                await after
            if not if_put_off or adapter_id in Admissions.of(engine).put_off:
                await engine.remove_lora(adapter_id)

    removing = asyncio.ensure_future(remove())
    _REMOVING.add(removing)
    removing.add_done_callback(_REMOVING.discard)


def _forget_admission(remove_lora: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(remove_lora)
    def forgetting(self: Any, lora_id: int) -> Any:
        Admissions.of(self).forget(lora_id)
        return remove_lora(self, lora_id)

    return forgetting


def _forget_admission_async(remove_lora: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(remove_lora)
    async def forgetting(self: Any, lora_id: int) -> Any:
        admissions = Admissions.of(self)
        async with admissions.removing(lora_id) as is_due:
            return not is_due or admissions.put_off_removal(lora_id) or await remove_lora(self, lora_id)

    return forgetting


def _list_kept(list_loras: Callable[..., Any]) -> Callable[..., Any]:
    """Without those whose removal was put off. vLLM's message has made a list of the set."""

    @functools.wraps(list_loras)
    async def listing(self: Any) -> Any:
        return set(await list_loras(self)) - Admissions.of(self).put_off

    return listing


def _fail_unanswered(ensure_output_queue_task: Callable[..., None]) -> Callable[..., None]:
    """Of the core's client: what waits for an answer fails when the task that reads answers has ended.

    That task ends when the engine is dead or shut down. vLLM tells it to requests, and leaves all other calls waiting.
    """

    @functools.wraps(ensure_output_queue_task)
    def ensuring(self: Any) -> None:
        before = self.resources.output_queue_task
        ensure_output_queue_task(self)
        reading, calls = self.resources.output_queue_task, self.utility_results
        if reading is not before or reading.done():
            reading.add_done_callback(lambda _: _fail(calls))

    return ensuring


def _fail(calls: dict[int, asyncio.Future[Any]]) -> None:
    for call in calls.values():
        if not call.done():
            call.set_exception(EngineDeadError())
    calls.clear()

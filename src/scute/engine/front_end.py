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

from scute.engine import upstream
from scute.engine.base import check_folder
from scute.engine.checks import check_config
from scute.engine.options import Options
from scute.engine.refusals import find_refusal
from scute.engine.serving import answer_refusals, release_unloaded

_CLIENTS = frozenset({"vllm.v1.engine.llm_engine", "vllm.v1.engine.async_llm", "vllm.entrypoints.openai.api_server"})


def bind() -> None:
    """Wrap the engine clients and the model list of the API server, in processes that are a front end."""
    if not _is_front_end():
        return
    upstream.check_signatures(upstream.FRONT_END_SIGNATURES)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    EngineArgs.create_engine_config = _check_config(EngineArgs.create_engine_config)
    LLMEngine.add_request = _admit_first(LLMEngine.add_request)
    LLMEngine.remove_lora = _forget_admission(LLMEngine.remove_lora)
    AsyncLLM.add_request = _admit_first_async(AsyncLLM.add_request)
    AsyncLLM.add_lora = _remember_admission(AsyncLLM.add_lora)
    AsyncLLM.remove_lora = _forget_admission(AsyncLLM.remove_lora)
    OpenAIServingModels.load_lora_adapter = answer_refusals(OpenAIServingModels.load_lora_adapter)
    OpenAIServingModels.unload_lora_adapter = release_unloaded(OpenAIServingModels.unload_lora_adapter)


def _is_front_end() -> bool:
    """The first process, or a child that has imported a client: an API server, or a script's own worker."""
    return multiprocessing.parent_process() is None or not _CLIENTS.isdisjoint(sys.modules)


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


def _admitted(engine: Any) -> set[tuple[int, str]]:
    """(id, path) of the adapters that this engine client has had admitted."""
    if not hasattr(engine, "_scute_admitted"):
        engine._scute_admitted = set()
    return engine._scute_admitted


def _key(request: LoRARequest) -> tuple[int, str]:
    return request.lora_int_id, request.lora_path


def _new_adapter(engine: Any, bound: inspect.BoundArguments) -> LoRARequest | None:
    """The adapter of an `add_request` call, if its engine has not admitted it yet.

    Raises ValueError where the id is that of another adapter: which of the two answered would depend on eviction.
    """
    given = bound.arguments
    request = given.get("lora_request") or getattr(given.get("prompt"), "lora_request", None)
    if request is None or engine.vllm_config.lora_config is None:
        return None
    if request.load_inplace:
        return request
    if _key(request) in _admitted(engine):
        return None
    if request.lora_int_id in {adapter_id for adapter_id, _ in _admitted(engine)}:
        raise ValueError(
            f"lora_int_id {request.lora_int_id} is the id of another adapter; give {request.lora_name!r} an id of its "
            "own, or set load_inplace to replace it."
        )
    return request


def _remember(engine: Any, request: LoRARequest) -> None:
    admitted = _admitted(engine)
    admitted -= {key for key in admitted if key[0] == request.lora_int_id}
    admitted.add(_key(request))


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
        adapter = _new_adapter(self, bound)
        if adapter is not None:
            check_folder(self.vllm_config.model_config, adapter.lora_path)
            with _refusals():
                self.add_lora(adapter)
            _remember(self, adapter)
            bound = _as_loaded(bound)
        return add_request(*bound.args, **bound.kwargs)

    return gated


def _admit_first_async(add_request: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(add_request)

    @functools.wraps(add_request)
    async def gated(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        adapter = _new_adapter(self, bound)
        if adapter is not None:
            with _refusals():
                await self.add_lora(adapter)
            bound = _as_loaded(bound)
        return await add_request(*bound.args, **bound.kwargs)

    return gated


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
    async def remembering(self: Any, lora_request: LoRARequest) -> Any:
        await asyncio.to_thread(check_folder, self.vllm_config.model_config, lora_request.lora_path)
        result = await add_lora(self, lora_request)
        _remember(self, lora_request)
        lora_request.load_inplace = False  # the server keeps it for later requests; vLLM 0.33 resets it likewise
        return result

    return remembering


def _forget_admission(remove_lora: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(remove_lora)
    def forgetting(self: Any, lora_id: int) -> Any:
        admitted = _admitted(self)
        admitted -= {key for key in admitted if key[0] == lora_id}
        return remove_lora(self, lora_id)

    return forgetting

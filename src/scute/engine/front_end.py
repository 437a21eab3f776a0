"""The front end's part: admit an adapter before its first request is queued, and say why it was refused.

vLLM loads an adapter it has not seen in the middle of a step, where an error ends the engine. Admitting it by the
`add_lora` call first makes the error the caller's.
"""

import functools
import inspect
import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

from vllm.lora.request import LoRARequest

from scute.engine.checks import check_config
from scute.engine.options import Options
from scute.engine.refusals import find_refusal
from scute.engine.serving import answer_refusals, release_unloaded

_CLIENTS = frozenset({"vllm.entrypoints.llm", "vllm.entrypoints.openai.api_server"})


def bind() -> None:
    """Wrap the engine clients and the model list of the API server, in processes that are a front end."""
    if not _is_front_end():
        return
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


def _new_adapter(engine: Any, signature: inspect.Signature, args: Any, kwargs: Any) -> LoRARequest | None:
    """The adapter of an `add_request` call, if its engine has not admitted it yet."""
    given = signature.bind(engine, *args, **kwargs).arguments
    request = given.get("lora_request") or getattr(given.get("prompt"), "lora_request", None)
    if request is None or (_key(request) in _admitted(engine) and not request.load_inplace):
        return None
    return request


def _remember(engine: Any, request: LoRARequest) -> None:
    """The adapter is loaded: a step that finds `load_inplace` still set would read the folder again, every time."""
    _admitted(engine).add(_key(request))
    request.load_inplace = False


def _admit_first(add_request: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(add_request)

    @functools.wraps(add_request)
    def gated(self: Any, *args: Any, **kwargs: Any) -> Any:
        adapter = _new_adapter(self, signature, args, kwargs)
        if adapter is not None:
            try:
                self.add_lora(adapter)
            except Exception as error:
                raise find_refusal(str(error)) or error from error
            _remember(self, adapter)
        return add_request(self, *args, **kwargs)

    return gated


def _admit_first_async(add_request: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(add_request)

    @functools.wraps(add_request)
    async def gated(self: Any, *args: Any, **kwargs: Any) -> Any:
        adapter = _new_adapter(self, signature, args, kwargs)
        if adapter is not None:
            try:
                await self.add_lora(adapter)
            except Exception as error:
                raise find_refusal(str(error)) or error from error
        return await add_request(self, *args, **kwargs)

    return gated


def _remember_admission(add_lora: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(add_lora)
    async def remembering(self: Any, lora_request: LoRARequest) -> Any:
        result = await add_lora(self, lora_request)
        _remember(self, lora_request)
        return result

    return remembering


def _forget_admission(remove_lora: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(remove_lora)
    def forgetting(self: Any, lora_id: int) -> Any:
        admitted = _admitted(self)
        admitted -= {key for key in admitted if key[0] == lora_id}
        return remove_lora(self, lora_id)

    return forgetting

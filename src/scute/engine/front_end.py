"""The front end's part: admit an adapter before its first request is queued, and say why it was refused.

vLLM loads an adapter it has not seen in the middle of a step, where an error ends the engine. Admitting it by the
`add_lora` call first makes the error the caller's.
"""

import functools
import inspect
import multiprocessing
import re
import sys
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from vllm.lora.request import LoRARequest

from scute.errors import Code, Refusal

_REFUSAL = re.compile(
    r"\[scute:(?P<code>[a-z_.]+)\] (?P<sentence>.*?)(?:', please check the stack trace.*)?$", re.DOTALL
)


def bind() -> None:
    """Wrap the engine clients and the model list of the API server, in processes that are a front end."""
    if not _is_front_end():
        return
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    LLMEngine.add_request = _admit_first(LLMEngine.add_request)
    LLMEngine.remove_lora = _forget_admission(LLMEngine.remove_lora)
    AsyncLLM.add_request = _admit_first_async(AsyncLLM.add_request)
    AsyncLLM.add_lora = _remember_admission(AsyncLLM.add_lora)
    AsyncLLM.remove_lora = _forget_admission(AsyncLLM.remove_lora)
    OpenAIServingModels.load_lora_adapter = _answer_refusals(OpenAIServingModels.load_lora_adapter)


def _is_front_end() -> bool:
    return multiprocessing.parent_process() is None or "vllm.entrypoints.openai.api_server" in sys.modules


def find_refusal(text: str) -> Refusal | None:
    """The refusal that a message from another process carries, if it does."""
    match = _REFUSAL.search(text)
    if match is None or match["code"] not in list(Code):
        return None
    return Refusal(Code(match["code"]), match["sentence"])


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
    return request if request is not None and _key(request) not in _admitted(engine) else None


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
            _admitted(self).add(_key(adapter))
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
        _admitted(self).add(_key(lora_request))
        return result

    return remembering


def _forget_admission(remove_lora: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(remove_lora)
    def forgetting(self: Any, lora_id: int) -> Any:
        admitted = _admitted(self)
        admitted -= {key for key in admitted if key[0] == lora_id}
        return remove_lora(self, lora_id)

    return forgetting


def _answer_refusals(load_lora_adapter: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load_lora_adapter)
    async def answering(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = await load_lora_adapter(self, *args, **kwargs)
        error = getattr(result, "error", None)
        refusal = None if error is None else find_refusal(error.message)
        if error is not None and refusal is not None:
            error.message, error.type, error.code = str(refusal), "BadRequestError", HTTPStatus.BAD_REQUEST.value
        return result

    return answering

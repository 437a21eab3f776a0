"""A refusal on its way between processes: as an answer of a worker, and as the text that an error becomes."""

import functools
import re
from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger

from scute.errors import Code, Refusal

logger = init_logger("vllm.scute")

_REFUSAL = re.compile(
    r"\[scute:(?P<code>[a-z_.]+)\] (?P<sentence>.*?)(?:', please check the stack trace.*)?$", re.DOTALL
)


def find_refusal(text: str) -> Refusal | None:
    """The refusal that a message from another process carries, if it does."""
    match = _REFUSAL.search(text)
    if match is None or match["code"] not in list(Code):
        return None
    return Refusal(Code(match["code"]), match["sentence"])


def answer_with_refusal(add_lora: Callable[..., Any]) -> Callable[..., Any]:
    """Of the model runner: the sentence instead of an exception, and any other error as text too.

    vLLM's executor stops reading at the first rank that fails, and would take the other ranks' answers for those of
    its next calls.
    """

    @functools.wraps(add_lora)
    def answering(self: Any, lora_request: Any) -> Any:
        try:
            return add_lora(self, lora_request)
        except Refusal as refusal:
            return str(refusal)
        except Exception as error:
            logger.exception("Adapter %r could not be admitted", lora_request.lora_name)
            return f"{type(error).__name__}: {error}"

    return answering


def raise_answered_refusal(add_lora: Callable[..., Any]) -> Callable[..., Any]:
    """Of the executor: raises the refusal of the rank that found the reason, or another rank's error."""

    @functools.wraps(add_lora)
    def raising(self: Any, lora_request: Any) -> Any:
        answers = self.collective_rpc("add_lora", args=(lora_request,))
        texts = [answer for answer in answers if isinstance(answer, str)]
        found = [refusal for text in texts if (refusal := find_refusal(text)) is not None]
        errors = [text for text in texts if find_refusal(text) is None]
        if errors:
            raise RuntimeError(errors[0])
        if found:
            raise min(found, key=lambda refusal: refusal.code is Code.PEER_RANK_FAILED)
        return all(answers)

    return raising

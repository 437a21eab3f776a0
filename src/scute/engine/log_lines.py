"""What vLLM logs of adapters, where it would mislead: a refusal is no crash, and a reload leaves no cached prefix."""

import logging

from scute.errors import Refusal

CORE = "vllm.v1.engine.core"
MODELS = "vllm.entrypoints.openai.models.serving"


def bind() -> None:
    """Filter what these modules log."""
    logging.getLogger(CORE).addFilter(shorten_refusal)
    logging.getLogger(MODELS).addFilter(drop_stale_warning)


def shorten_refusal(record: logging.LogRecord) -> bool:
    """Of a call that failed: the sentence in a line, where vLLM would add the traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, Refusal):
        record.msg, record.args, record.exc_info = "An adapter was refused: %s", (error,), None
        record.levelno, record.levelname = logging.WARNING, logging.getLevelName(logging.WARNING)
    return True


def drop_stale_warning(record: logging.LogRecord) -> bool:
    """Of a reload from the same path: vLLM warns of prefixes of the old weights, which are not found again."""
    return not str(record.msg).startswith("Reloaded LoRA adapter")

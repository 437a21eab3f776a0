"""What is logged of a refusal and of a reload, by vLLM's own code."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_resolvers import models_of
from vllm.v1.engine import UtilityOutput
from vllm.v1.engine.core import EngineCoreProc

from scute.engine import log_lines
from scute.errors import Code, Refusal

REFUSAL = Refusal(Code.CAPACITY_RANK, "LoRA rank 513 is greater than max_lora_rank 512.")


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def log() -> Iterator[Kept]:
    log_lines.bind()
    kept, loggers = Kept(), [logging.getLogger(name) for name in (log_lines.CORE, log_lines.MODELS)]
    for logger in loggers:
        logger.addHandler(kept)
    yield kept
    for logger in loggers:
        logger.removeHandler(kept)


def fail(error: Exception) -> None:
    def add_lora() -> Any:
        raise error

    output = UtilityOutput(1)
    EngineCoreProc._invoke_utility_method("add_lora", add_lora, output, lambda _: None)
    assert str(error) in str(output.failure_message)


def test_a_refusal_is_a_line(log):
    fail(REFUSAL)
    (line,) = log.records
    assert (line.levelname, line.exc_info, line.getMessage()) == ("WARNING", None, f"An adapter was refused: {REFUSAL}")


def test_another_error_keeps_its_traceback(log):
    fail(RuntimeError("no memory"))
    (line,) = log.records
    assert line.levelname == "ERROR"
    assert line.exc_info is not None


def test_a_reload_does_not_warn(log, tmp_path: Path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, log_lines.MODELS)
    monkeypatch.setattr("scute.engine.front_end.check_folder", lambda *_: None)

    async def load_twice() -> None:
        models = models_of({})
        for _ in range(2):
            answer = await models.load("a", tmp_path, load_inplace=True)
            assert isinstance(answer, str), answer

    asyncio.run(load_twice())
    assert [line.getMessage().partition(":")[0] for line in log.records] == ["Loaded new LoRA adapter"] * 2

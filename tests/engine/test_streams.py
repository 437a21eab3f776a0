"""Requests of the asynchronous engine that outlive the removal and the replacement of their adapter."""

import asyncio
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from conftest import _row, disagreement
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from scute.engine.offline import Row
from scute.testing.tiny import tiny_prompts

pytestmark = pytest.mark.engine

BOUND = 1e-4


Scenario = Callable[[Any], Awaitable[None]]


@pytest.fixture(scope="module")
def run(world) -> Iterator[Callable[[Scenario], None]]:
    """Runs scenarios in one engine, which holds no adapter before and after each."""
    options = world.engine(dtype="float32", max_loras=2, max_cpu_loras=2)
    arguments = AsyncEngineArgs(model=str(world.base), skip_tokenizer_init=True, enable_lora=True, **options)

    async def make() -> Any:
        return AsyncLLM.from_engine_args(arguments)

    async def finish(scenario: Scenario) -> None:
        await asyncio.wait_for(scenario(engine), 120)
        while await held(engine):
            await asyncio.sleep(0.05)

    with asyncio.Runner() as runner:
        engine = runner.run(make())
        yield lambda scenario: runner.run(finish(scenario))
        engine.shutdown()


async def held(engine: Any) -> list[str]:
    """The names of what the worker holds."""
    (report,) = await engine.collective_rpc("scute_report")
    return sorted(name for _, name, *_ in report["adapters"])


async def answer(
    engine: Any, name: str, prompt: Any, adapter: LoRARequest, tokens: int, begun: asyncio.Event | None = None
) -> Row:
    """begun: set with the first token."""
    parameters = SamplingParams(
        temperature=0, logprobs=0, max_tokens=tokens, ignore_eos=True, detokenize=False,
        output_kind=RequestOutputKind.CUMULATIVE,
    )  # fmt: skip
    async for output in engine.generate(prompt, parameters, name, lora_request=adapter):
        last = output
        if begun is not None:
            begun.set()
    return _row(last)


def test_a_stream_that_has_said_nothing_keeps_its_adapter(world, run, tmp_path):
    """The folder is gone by then: a step that looked for the adapter would end the engine."""
    adapter = LoRARequest("talks", 1, str(shutil.copytree(world.folders["oft"], tmp_path / "oft")))
    speak = asyncio.Event()

    async def prompt() -> AsyncGenerator[StreamingInput]:
        await speak.wait()
        yield StreamingInput({"prompt_token_ids": tiny_prompts(1)[0]})

    async def scenario(engine: Any) -> None:
        streaming = asyncio.create_task(answer(engine, "stream", prompt(), adapter, 12))
        while await held(engine) != ["talks"]:
            await asyncio.sleep(0.01)
        shutil.rmtree(adapter.lora_path)
        assert await engine.remove_lora(1)
        assert await engine.list_loras() == set()
        speak.set()
        assert disagreement(world, "oft", [await streaming]) <= BOUND

    run(scenario)


def test_requests_that_run_keep_the_adapter_that_is_replaced_under_its_id(world, run):
    prompt = {"prompt_token_ids": tiny_prompts(1)[0]}

    async def scenario(engine: Any) -> None:
        old, new = (LoRARequest("tenant", 1, world.folders[name], load_inplace=True) for name in ("oft", "dora"))
        begun = asyncio.Event()
        running = asyncio.create_task(answer(engine, "old", prompt, old, 200, begun))
        await begun.wait()
        await engine.add_lora(new)
        assert await held(engine) == ["tenant", "tenant"]
        assert await engine.list_loras() == {1}
        assert disagreement(world, "dora", [await answer(engine, "new", prompt, new, 8)]) <= BOUND
        assert not running.done()
        assert disagreement(world, "oft", [await running]) <= BOUND
        while await held(engine) != ["tenant"]:
            await asyncio.sleep(0.01)
        assert disagreement(world, "dora", [await answer(engine, "again", prompt, new, 8)]) <= BOUND
        await engine.remove_lora(1)

    run(scenario)

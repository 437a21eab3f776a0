"""A process of the engine that is killed ends the running requests with an error, and answers nobody's with another's.

Nobody waits for an adapter that will never be loaded. An engine runs in a process group of its own, so that a hang ends
at a time limit and leaves nothing behind.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from http_server import serve

pytestmark = pytest.mark.engine

NAMES = ["lora-r8", "dora", "oft", "ia3"]
TOKENS = 220
SECONDS_TO_START, SECONDS_TO_FAIL = 240, 60
TOLERANCE = 1e-4
"""Nats a token; the adapters are half a nat apart, and two float32 batches some millionths."""


@pytest.mark.parametrize(("victim", "ranks"), [("worker", 2), ("core", 1)])
def test_a_killed_process_is_an_error(world, tmp_path, victim: str, ranks: int):
    given, result = tmp_path / "given.json", tmp_path / "result.json"
    engine = world.engine(
        dtype="float32", tensor_parallel_size=ranks, distributed_executor_backend="mp", max_loras=len(NAMES)
    )
    folders = {name: world.folders[name] for name in NAMES}
    given.write_text(json.dumps({"base": str(world.base), "folders": folders, "engine": engine, "victim": victim}))
    binding = "|".join(map(str, range(ranks)))
    environment = os.environ | ({"VLLM_CPU_OMP_THREADS_BIND": binding} if ranks > 1 else {})
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, str(given), str(result)],
            env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(timeout=SECONDS_TO_START + 2 * SECONDS_TO_FAIL)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it hangs:\n{(tmp_path / 'log').read_text()[-4000:]}")
        finally:
            kill_group(process.pid)
    assert result.exists(), (tmp_path / "log").read_text()[-4000:]
    report = json.loads(result.read_text())
    assert report["killed"], "there was no process to kill"
    assert set(report["errors"].values()) == {"EngineDeadError"}, "every request was still running"
    assert report["seconds_to_error"] < SECONDS_TO_FAIL
    assert report["error_afterwards"] == "EngineDeadError"
    assert all(TOKENS // 4 <= len(answer["tokens"]) < TOKENS for answer in report["answers"].values())
    assert {name: wrong for name in report["answers"] if (wrong := differences(report, name))} == {}


@pytest.mark.parametrize("ending", ["the core is killed", "the server is told to end"])
def test_whoever_waits_for_an_adapter_is_answered_at_the_end(world, tmp_path, ending: str):
    """A load and a request that looks a name up, while the engine is busy; and the server exits."""
    root = str(Path(world.folders["oft"]).parent)
    with serve(world.base, tmp_path, {}, {"allowed_roots": [root]}) as server, ThreadPoolExecutor() as threads:
        core = core_of(server.process.pid)
        core.suspend()
        calls = [
            threads.submit(server.load, "dora", world.folders["dora"]),
            threads.submit(server.post, "/v1/completions", model="oft", prompt=[5, 6], max_tokens=1),
        ]
        time.sleep(2)
        assert not any(call.done() for call in calls)
        if ending == "the core is killed":
            core.kill()
        else:
            server.process.terminate()
        answers = [call.result(timeout=SECONDS_TO_FAIL) for call in calls]
        assert [answer.status_code for answer in answers] == [500, 500]
        assert all("EngineCore encountered an issue" in answer.text for answer in answers)
        server.process.wait(timeout=SECONDS_TO_FAIL)


def differences(report: dict[str, Any], name: str) -> list[str]:
    """Where what was streamed before the error is not what the adapter says alone, or is what another says."""
    answer, alone = report["answers"][name], report["alone"][name]
    found = len(answer["tokens"])
    wrong = [] if answer["tokens"] == alone["tokens"][:found] else ["other tokens"]
    pairs = zip(answer["logprobs"], alone["logprobs"], strict=False)
    wrong += [f"{a} and {b}" for a, b in pairs if abs(a - b) > TOLERANCE]
    others = [other["tokens"][:found] for key, other in report["alone"].items() if key != name]
    return wrong + ["the tokens of another adapter"] * (answer["tokens"] in others)


def kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


async def main(given: dict[str, Any]) -> dict[str, Any]:
    """Stream every adapter at once, kill a process in the middle, and say what came back.

    With the asynchronous engine, as the API server has it: `vllm.LLM` waits for ever where the core is killed.
    """
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    from scute.testing.tiny import tiny_prompts

    options = AsyncEngineArgs(model=given["base"], skip_tokenizer_init=True, enable_lora=True, **given["engine"])
    engine = AsyncLLM.from_engine_args(options)
    prompt = {"prompt_token_ids": tiny_prompts(1)[0]}
    adapters = {name: LoRARequest(name, 1 + i, path) for i, (name, path) in enumerate(given["folders"].items())}
    parameters = SamplingParams(temperature=0, logprobs=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)

    async def stream(name: str, request_id: str, answers: dict[str, Any]) -> str | None:
        """Fill in what the adapter answers; the name of the error that ends it."""
        try:
            async for output in engine.generate(prompt, parameters, request_id, lora_request=adapters[name]):
                answers[name] = stream_of(output)
        except Exception as error:
            return type(error).__name__
        return None

    alone: dict[str, Any] = {}
    for name in adapters:
        await stream(name, f"{name}-alone", alone)
    answers: dict[str, Any] = {name: {"tokens": []} for name in adapters}
    streams = [asyncio.create_task(stream(name, name, answers)) for name in adapters]
    while min(len(answer["tokens"]) for answer in answers.values()) < TOKENS // 4:
        await asyncio.sleep(0)
    start, killed = time.monotonic(), kill(given["victim"])
    errors = dict(zip(adapters, await asyncio.gather(*streams), strict=True))
    seconds = time.monotonic() - start
    return {
        "alone": alone,
        "answers": answers,
        "killed": killed,
        "errors": errors,
        "seconds_to_error": seconds,
        "error_afterwards": await stream("dora", "afterwards", {}),
    }


def stream_of(output: Any) -> dict[str, Any]:
    (answer,) = output.outputs
    tokens = list(answer.token_ids)
    logprobs = [step[token].logprob for token, step in zip(tokens, answer.logprobs, strict=True)]
    return {"tokens": tokens, "logprobs": logprobs}


def kill(victim: str) -> int:
    """End the last rank, or the engine core, as the kernel would; the number of the process."""
    core = core_of(os.getpid())
    workers = [p for p in core.children(recursive=True) if "resource_tracker" not in " ".join(p.cmdline())]
    process = core if victim == "core" else max(workers, key=lambda p: p.pid)
    process.kill()
    return int(process.pid)


def core_of(client: int) -> psutil.Process:
    """The engine core of the process that has started it."""
    (core,) = [p for p in psutil.Process(client).children() if "resource_tracker" not in " ".join(p.cmdline())]
    return core


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))))

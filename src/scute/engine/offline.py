"""One engine, one mixed batch, in a process of its own: how tests and benchmarks hold engines side by side.

    python -m scute.engine.offline BATCH.json RESULT.json

Also runs vLLM without Scute (VLLM_PLUGINS=""), so that both arms share every line but the plugin.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any, TypedDict


class Batch(TypedDict):
    """base: model folder. adapters: name to PEFT folder. prompts: token ids. rows: (adapter or None, prompt index).

    engine: keyword arguments of `vllm.LLM`. repeat: how often the batch is run in the same engine.
    """

    base: str
    adapters: dict[str, str]
    prompts: list[list[int]]
    rows: list[tuple[str | None, int]]
    engine: dict[str, Any]
    repeat: int


class Row(TypedDict):
    """tokens: the prompt and its greedy continuation. logprobs: of all tokens after the first, in nats."""

    tokens: list[int]
    logprobs: list[float]


OUTPUT_TOKENS = 8
OWN_ARGUMENTS = frozenset({"model", "skip_tokenizer_init", "enable_lora"})
"""Of `vllm.LLM`, given here."""


def check_arguments(engine: Mapping[str, Any]) -> None:
    """Raises ValueError for an argument that `vllm.LLM` does not take, or that is given here."""
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    known = {*signature(LLM.__init__).parameters, *(f.name for f in fields(EngineArgs))} - {"self", "kwargs"}
    wrong = [name for name in engine if name not in known - OWN_ARGUMENTS]
    if wrong:
        near = get_close_matches(wrong[0], known - OWN_ARGUMENTS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{wrong[0]} is no argument of vllm.LLM that may be given here{hint}")


def run(batch: Batch) -> list[list[Row]]:
    """Serve the batch `repeat` times; one list of rows each time."""
    from vllm import LLM

    engine = LLM(model=batch["base"], skip_tokenizer_init=True, enable_lora=bool(batch["adapters"]), **batch["engine"])
    return [_serve(engine, batch) for _ in range(batch["repeat"])]


def _serve(engine: Any, batch: Batch) -> list[Row]:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    requests = {n: LoRARequest(n, number, path) for number, (n, path) in enumerate(batch["adapters"].items(), start=1)}
    outputs = engine.generate(
        [{"prompt_token_ids": batch["prompts"][index]} for _, index in batch["rows"]],
        SamplingParams(
            temperature=0, prompt_logprobs=0, logprobs=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False
        ),
        lora_request=[None if name is None else requests[name] for name, _ in batch["rows"]],
        use_tqdm=False,
    )
    return [_row(output) for output in outputs]


def _row(output: Any) -> Row:
    """The row of a vLLM `RequestOutput` that has prompt and output log-probabilities."""
    (continuation,) = output.outputs
    tokens = [*output.prompt_token_ids, *continuation.token_ids]
    steps = [*output.prompt_logprobs[1:], *continuation.logprobs]
    return Row(tokens=tokens, logprobs=[s[t].logprob for t, s in zip(tokens[1:], steps, strict=True)])


def run_apart(batch: Batch, *, with_scute: bool = True, environment: dict[str, str] | None = None) -> list[list[Row]]:
    """`run` in a fresh process. Raises RuntimeError with the end of its output if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        given, result = Path(folder, "batch.json"), Path(folder, "result.json")
        given.write_text(json.dumps(batch))
        env = os.environ | (environment or {}) | ({} if with_scute else {"VLLM_PLUGINS": ""})
        command = [sys.executable, "-m", "scute.engine.offline", str(given), str(result)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode or not result.exists():
            raise RuntimeError(f"the engine failed:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}")
        rows: list[list[Row]] = json.loads(result.read_text())
        return rows


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(run(json.loads(Path(sys.argv[1]).read_text()))))

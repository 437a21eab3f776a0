"""Adapters that are loaded, unloaded and loaded again under one name while 32 streams decode: whose is every answer?

    python benchmarks/churn.py --seconds 600 --out churn.json

A tiny model with random weights and amplified adapters of every method. Each tenant has one name and one path; a reload
puts another adapter of another method there, under a new id as the API server gives it, or in place under the old id.
Streams that run keep the adapter that they began with. Afterwards every answer is scored under every adapter, one
adapter at a time in the same engine: its log-probabilities must be those of its own adapter, up to a share of the
distance to the nearest other one. The adapters by themselves are held against the PEFT library.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tiny_engine
import torch

from scute.agreement import agreement
from scute.testing.oracle import Oracle
from scute.testing.tiny import tiny_prompts

STREAMS = 32
LENGTHS = (8, 16, 24, 48)
BOUNDS = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.3}
"""Most that an answer may be off its adapter, as a share of the distance to the nearest other adapter."""

Key = tuple[str | None, int, tuple[int, ...]]


@dataclass
class Tenant:
    """A name and a path that stay, and the adapter that is there now; it is unloaded while `request` is None."""

    name: str
    path: Path
    adapter: str = ""
    request: Any = None


@dataclass
class Answers:
    """Log-probabilities of every answer, by adapter (None is the base model), prompt and tokens."""

    found: dict[Key, list[np.ndarray]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(map(len, self.found.values())) + len(self.broken)


class Churn:
    """Streams of requests in one engine, and the operations between its steps."""

    def __init__(
        self,
        llm: Any,
        folders: Mapping[str, Path],
        work: Path,
        *,
        streams: int = STREAMS,
        seed: int = 0,
    ) -> None:
        self.llm, self.engine, self.folders, self.streams = llm, llm.llm_engine, folders, streams
        self.random = random.Random(seed)
        # Shorter and longer than a cached block; the first two begin alike.
        prompts = tiny_prompts(4, length=40, seed=seed) + tiny_prompts(2, length=90, seed=seed + 1)
        self.prompts = [prompts[0], prompts[0][:32] + prompts[1], *prompts[2:]]
        self.tenants = [Tenant(f"tenant-{i}", work / f"tenant-{i}") for i in range(max(2, len(folders) - 2))]
        self.answers = Answers()
        self.counts: Counter[str] = Counter()
        self.next_id = 1000
        self.running: dict[str, tuple[str | None, int, int, int]] = {}  # adapter, its id, prompt, tokens

    def run(self, seconds: float, every: int = 6) -> None:
        """Keep the streams busy for so long, with an operation every so many steps; then let them end."""
        for tenant in self.tenants:
            self.load(tenant)
        end, step = time.monotonic() + seconds, 0
        while time.monotonic() < end or self.running:
            while len(self.running) < self.streams and time.monotonic() < end:
                self.ask()
            self.collect()
            step += 1
            if step % every == 0:
                self.operate()
        self.counts["steps"] = step

    def operate(self) -> None:
        tenant = self.random.choice(self.tenants)
        if tenant.request is None:
            self.load(tenant)
        elif self.random.random() < 0.3:
            self.unload(tenant)
        elif self.random.random() < 0.5:
            self.load_in_place(tenant)
        else:
            self.unload(tenant)
            self.load(tenant)
            self.counts["reloads"] += 1

    def _is_used(self, tenant: Tenant) -> bool:
        return tenant.request.lora_int_id in {adapter_id for _, adapter_id, _, _ in self.running.values()}

    def load(self, tenant: Tenant) -> None:
        self.next_id += 1
        tenant.request = self._put(tenant, self.next_id)
        self.engine.add_lora(tenant.request)
        self.counts["loads"] += 1

    def load_in_place(self, tenant: Tenant) -> None:
        adapter_id = tenant.request.lora_int_id
        self.counts["reloads_in_place_while_running"] += self._is_used(tenant)
        self.engine.add_lora(self._put(tenant, adapter_id, load_inplace=True))
        self.counts["reloads_in_place"] += 1

    def unload(self, tenant: Tenant) -> None:
        is_used = self._is_used(tenant)
        self.engine.remove_lora(tenant.request.lora_int_id)
        tenant.request = None
        self.counts["unloads"] += 1
        self.counts["unloads_while_running"] += is_used

    def _put(self, tenant: Tenant, adapter_id: int, **options: Any) -> Any:
        """Another adapter where the tenant's was: the same name and the same path."""
        from vllm.lora.request import LoRARequest

        tenant.adapter = self.random.choice([name for name in self.folders if name != tenant.adapter])
        shutil.rmtree(tenant.path, ignore_errors=True)
        shutil.copytree(self.folders[tenant.adapter], tenant.path)
        return LoRARequest(tenant.name, adapter_id, str(tenant.path), **options)

    def ask(self) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        loaded = [tenant for tenant in self.tenants if tenant.request is not None]
        tenant = self.random.choice([None, *loaded]) if self.random.random() < 0.5 or not loaded else loaded[0]
        request = None if tenant is None else tenant.request
        prompt, tokens = self.random.randrange(len(self.prompts)), self.random.choice(LENGTHS)
        self.counts["requests"] += 1
        name = f"{self.counts['requests']}"
        parameters = SamplingParams(
            temperature=0, logprobs=0, max_tokens=tokens, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        given = {"prompt_token_ids": self.prompts[prompt]}
        self.engine.add_request(name, given, parameters, lora_request=request)
        adapter = None if tenant is None else tenant.adapter
        self.running[name] = adapter, 0 if request is None else request.lora_int_id, prompt, tokens

    def collect(self) -> None:
        """One step of the engine."""
        for output in self.engine.step():
            if output.finished:
                self._record(output)

    def _record(self, output: Any) -> None:
        adapter, _, prompt, count = self.running.pop(output.request_id)
        (answer,) = output.outputs
        tokens = tuple(answer.token_ids)
        if len(tokens) != count or list(output.prompt_token_ids) != self.prompts[prompt]:
            self.answers.broken.append(f"{output.request_id}: {len(tokens)} of {count} tokens")
            return
        logprobs = [step[token].logprob for token, step in zip(tokens, answer.logprobs, strict=True)]
        key = adapter, prompt, tokens
        self.answers.found.setdefault(key, []).append(np.asarray(logprobs, dtype=np.float32))
        self.counts["prompts_from_cache"] += output.num_cached_tokens > 0


class Judge:
    """Scores token sequences under every adapter, one adapter at a time."""

    def __init__(self, llm: Any, folders: Mapping[str, Path], prompts: Sequence[list[int]]) -> None:
        from vllm.lora.request import LoRARequest

        self.llm, self.prompts = llm, prompts
        self.requests: dict[str | None, Any] = {None: None}
        self.requests |= {n: LoRARequest(f"alone-{n}", 500_000 + i, str(f)) for i, (n, f) in enumerate(folders.items())}
        self.expected: dict[tuple[int, tuple[int, ...]], dict[str | None, np.ndarray]] = {}

    def expect(self, keys: Sequence[Key]) -> None:
        """Compute what every adapter alone says of these answers. One that begins another is not asked for twice."""
        longest: list[tuple[int, tuple[int, ...]]] = []
        for prompt, tokens in sorted({(prompt, tokens) for _, prompt, tokens in keys}, reverse=True):
            if not (longest and longest[-1][0] == prompt and longest[-1][1][: len(tokens)] == tokens):
                longest.append((prompt, tokens))
        for adapter in self.requests:
            rows = self.score(adapter, [self.prompts[prompt] + list(tokens) for prompt, tokens in longest])
            for (prompt, tokens), row in zip(longest, rows, strict=True):
                for length in {len(t) for _, p, t in keys if p == prompt and t == tokens[: len(t)]}:
                    part = row[len(self.prompts[prompt]) - 1 :][:length]
                    self.expected.setdefault((prompt, tokens[:length]), {})[adapter] = part

    def score(self, adapter: str | None, sequences: Sequence[list[int]]) -> list[np.ndarray]:
        """Log-probabilities of all tokens but the first."""
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0, prompt_logprobs=0, max_tokens=1, detokenize=False)
        outputs = self.llm.generate(
            [{"prompt_token_ids": tokens} for tokens in sequences],
            parameters,
            lora_request=self.requests[adapter],
            use_tqdm=False,
        )
        return [
            np.asarray([step[t].logprob for t, step in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)])
            for tokens, output in zip(sequences, outputs, strict=True)
        ]

    def verdict(self, answers: Answers, bound: float) -> dict[str, Any]:
        """Which answers are wrong: nearer to another adapter than to their own, or off their own beyond the bound."""
        self.expect(list(answers.found))
        wrong, worst, nearest = list(answers.broken), 0.0, np.inf
        for (adapter, prompt, tokens), found in answers.found.items():
            expected = self.expected[prompt, tokens]
            own, names = expected[adapter], list(expected)
            others = np.asarray([np.abs(own - expected[name]).mean() for name in names if name != adapter])
            nearest = min(nearest, float(others.min()))
            for logprobs in found:
                distances = [float(np.abs(logprobs - expected[name]).mean()) for name in names]
                share = distances[names.index(adapter)] / float(others.min())
                worst = max(worst, share)
                if names[int(np.argmin(distances))] != adapter or not share <= bound:
                    whose = names[int(np.argmin(distances))]
                    wrong.append(f"an answer of {adapter} on prompt {prompt} is {share:.4f} off and nearest to {whose}")
        return {
            "answers": answers.count,
            "different_answers": len(answers.found),
            "wrong_answers": len(wrong),
            "largest_error_over_nearest_other": worst,
            "bound": bound,
            "nearest_two_adapters_nats_per_token": nearest,
            "first_wrong": wrong[:20],
        }

    def against_peft(self, oracle: Oracle, folders: Mapping[str, Path]) -> dict[str, float]:
        """Error over effect of every adapter alone."""
        ratios = {}
        for name, folder in folders.items():
            engine = [torch.from_numpy(row).float() for row in self.score(name, self.prompts)]
            plain, adapted = oracle.logprobs(self.prompts), oracle.logprobs(self.prompts, folder)
            ratios[name] = agreement(plain, adapted, engine).ratio
        return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default=tiny_engine.default_dtype())
    parser.add_argument("--max-loras", type=int, default=4, help="slots on the device; there are more tenants")
    parser.add_argument("--engine", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "scute-churn")
    parser.add_argument("--out", type=Path, default=Path("churn.json"))
    arguments = parser.parse_args()
    oracle, base, folders = tiny_engine.make(arguments.work, arguments.dtype)
    options = {
        "dtype": arguments.dtype,
        "max_loras": arguments.max_loras,
        "max_cpu_loras": arguments.max_loras,
        "max_num_seqs": STREAMS,
        "enable_prefix_caching": True,
        "block_size": 32,
        "additional_config": {"scute": {"shared_pairs": 2}},
    }
    llm = tiny_engine.start(base, **options | arguments.engine)
    llm.collective_rpc("count_slots")
    churn = Churn(llm, folders, arguments.work, seed=arguments.seed)
    churn.run(arguments.seconds)
    slots = llm.collective_rpc("slot_counts")[0]
    for tenant in churn.tenants:
        if tenant.request is not None:
            churn.unload(tenant)
    judge = Judge(llm, folders, churn.prompts)
    report = {
        "environment": tiny_engine.environment(),
        "options": options | arguments.engine,
        "seed": arguments.seed,
        "seconds": arguments.seconds,
        "streams": STREAMS,
        "tenants": len(churn.tenants),
        **churn.counts,
        **slots,
        **judge.verdict(churn.answers, BOUNDS[arguments.dtype]),
        "alone_against_peft": judge.against_peft(oracle, folders),
    }
    llm.llm_engine.engine_core.shutdown()
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return int(report["wrong_answers"] > 0 or report["answers"] == 0)


if __name__ == "__main__":
    sys.exit(main())

"""One client of one engine: sends a stream on an absolute clock, and notes when tokens come."""

import asyncio
import gc
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from serving.loads import Request

TRACES = "*.pt.trace.json"


class Timing(NamedTuple):
    """Seconds. late: from the planned arrival until it was sent. first: until its first token. token: mean gap then."""

    late: float
    first: float
    token: float


class Client:
    """Wraps vLLM's AsyncLLM, the engine behind its server."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        from vllm.config import ProfilerConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        given = dict(arguments)
        if "profiler_config" in given:  # not one of the dicts that AsyncEngineArgs makes a configuration of
            given["profiler_config"] = ProfilerConfig(**given["profiler_config"])
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**given))
        self._adapters: dict[str, Any] = {}
        self._sent = 0

    async def admit(self, name: str, folder: Path) -> None:
        from vllm.lora.request import LoRARequest

        request = LoRARequest(name, len(self._adapters) + 1, str(folder))
        if not await self._engine.add_lora(request):
            raise RuntimeError(f"the engine did not take {name}")
        self._adapters[name] = request

    async def stream(self, requests: Sequence[Request], tenants: Sequence[str | None]) -> tuple[list[Timing], float]:
        """Times of every request, and seconds of the whole stream. tenants: who stands at each position."""
        gc.collect()
        gc.disable()  # a collection would be billed to whichever arm it falls into
        try:
            start = time.perf_counter()
            timings = await asyncio.gather(*(self._timed(request, tenants, start) for request in requests))
            return timings, time.perf_counter() - start
        finally:
            gc.enable()

    async def profiled(self, requests: Sequence[Request], tenants: Sequence[str | None]) -> Path:
        """Serve a stream under vLLM's profiler; the file of the first worker's trace, which is complete."""
        folder = Path(self._engine.vllm_config.profiler_config.torch_profiler_dir)
        before = set(folder.glob(TRACES))
        await self._engine.start_profile()
        try:
            await self.stream(requests, tenants)
        finally:
            await self._engine.stop_profile()  # returns when every worker has written its trace
        written = sorted(set(folder.glob(TRACES)) - before)
        if not written:
            raise RuntimeError(f"vLLM's profiler wrote no trace into {folder}")
        return written[0]

    async def _timed(self, request: Request, tenants: Sequence[str | None], start: float) -> Timing:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        due = start + request.arrival
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        sampling = SamplingParams(
            temperature=0,
            max_tokens=request.output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        sent, first, received = time.perf_counter(), 0.0, 0
        async for output in self._generate(request.tokens, sampling, tenants[request.tenant]):
            last = time.perf_counter()
            first = first or last
            received += len(output.outputs[0].token_ids)
        if received != request.output_tokens:
            raise RuntimeError(f"a request for {request.output_tokens} tokens got {received}")
        return Timing(sent - due, first - due, (last - first) / max(1, received - 1))

    async def score(
        self, rows: Sequence[tuple[str | None, Sequence[int], Sequence[int]]], prompts: bool
    ) -> list[list[float]]:
        """One mixed batch of (tenant, prompt, what to decode); log-probabilities of the tokens, in nats.

        Of all but a row's first token, or of the decoded ones alone without `prompts`. What a row decodes must be one
        token again and again, as the sampler is told to allow no other; the values are the model's own all the same.
        """
        return await asyncio.gather(*(self._scored(*row, prompts) for row in rows))

    async def _scored(
        self, tenant: str | None, prompt: Sequence[int], decoded: Sequence[int], prompts: bool
    ) -> list[float]:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        (token,) = set(decoded)
        sampling = SamplingParams(
            temperature=0,
            max_tokens=len(decoded),
            allowed_token_ids=[token],
            prompt_logprobs=0 if prompts else None,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        outputs = [output async for output in self._generate(prompt, sampling, tenant)]
        (continuation,) = outputs[-1].outputs
        if list(continuation.token_ids) != list(decoded):
            raise RuntimeError("the engine decoded other tokens than it was allowed to")
        steps = [*(outputs[-1].prompt_logprobs or [None])[1:], *continuation.logprobs]
        tokens = [*prompt, *decoded][-len(steps) :]
        return [step[token].logprob for token, step in zip(tokens, steps, strict=True)]

    def _generate(self, tokens: Sequence[int], sampling: Any, tenant: str | None) -> Any:
        self._sent += 1
        return self._engine.generate(
            {"prompt_token_ids": list(tokens)},
            sampling,
            str(self._sent),
            lora_request=None if tenant is None else self._adapters[tenant],
        )

    @property
    def kv_cache_tokens(self) -> int | None:
        """How many tokens the KV cache holds."""
        cache = self._engine.vllm_config.cache_config
        return None if cache.num_gpu_blocks is None else cache.num_gpu_blocks * cache.block_size

    def close(self) -> None:
        self._engine.shutdown()

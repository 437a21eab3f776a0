"""The front end's part in observation: asks the engine what its adapters hold when somebody looks, and shows it.

Somebody looks where /metrics is scraped, or /v1/models is read after a load. A step does nothing for it.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import prometheus_client
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest

from scute.engine.admissions import Admissions
from scute.engine.metrics import OTHER, Metrics
from scute.engine.options import Options
from scute.engine.refusals import find_refusal
from scute.engine.request_tokens import CountedRequests
from scute.engine.residency import Residency, Resident, merge

logger = init_logger("vllm.scute")

PATIENCE_SECONDS = 1.0
"""How long a scrape waits for the engine; it shows the last figures then, and the next scrape the new ones."""

CARD_SECONDS = 10.0
"""How long model cards wait for the engine, which they do after a load alone."""

_NAME = "_scute_observer"


def bind() -> None:
    """Of a front end, over what admits adapters there: a load takes what its caller waits for."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.serve.instrumentator import metrics
    from vllm.v1.engine.async_llm import AsyncLLM

    AsyncLLM.__init__ = observe(AsyncLLM.__init__)
    AsyncLLM.add_lora = time_loads(AsyncLLM.add_lora)
    OpenAIServingModels.show_available_models = show_methods(OpenAIServingModels.show_available_models)
    metrics.attach_router = refresh_on_scrape(metrics.attach_router)


class Observer:
    """What one engine client knows of the adapters of its engine."""

    def __init__(self, engine: Any) -> None:
        config = engine.vllm_config
        ranks = getattr(engine.engine_core, "engine_ranks_managed", None) or [0]
        self._engine = engine
        self._num_slots: int = config.lora_config.max_loras
        self.metrics = Metrics(
            str(config.model_config.served_model_name),
            str(ranks[0]),
            Options.read(config).metrics_adapters,
            prometheus_client.REGISTRY if engine.log_stats else None,
        )
        self._requests: CountedRequests | None = None
        if engine.log_stats:
            processor = engine.output_processor
            self._requests = processor.lora_states = CountedRequests(processor.request_states, self._count)
        self._residency = Residency({}, {}, 0, 0)
        self._loads = 0
        self._told = -1  # loads when the engine was asked for what is known of it
        self._asking: asyncio.Task[None] | None = None

    async def refresh(self) -> None:
        """Ask the engine, once for all who look at a time, and set the metrics. Raises nothing."""
        await self._answer(PATIENCE_SECONDS)

    async def residents(self) -> Mapping[int, Resident]:
        """The loaded adapters by id, as of the last load or later."""
        for _ in range(2):  # the engine may have been asked before the load, and not have answered
            if self._told < self._loads:
                await self._answer(CARD_SECONDS)
        return self._residency.adapters

    def loaded(self, request: LoRARequest, seconds: float, *, is_new: bool) -> None:
        """Note that the engine has the adapter; is_new: it did not have it, or has other weights now."""
        self._loads += 1
        if is_new:
            self.metrics.observe_load(request.lora_name, seconds)

    async def _answer(self, patience: float) -> None:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        await asyncio.wait({self._asking}, timeout=patience)

    async def _ask(self) -> None:
        loads = self._loads
        try:
            before = self._residency.adapters
            self._residency = merge(await self._engine.collective_rpc("scute_report"))
            self._told = loads
            self._show(before)
        except Exception as error:  # an engine that is gone must not take down the page that says so
            logger.debug("No figures of the adapters: %s", error)

    def _show(self, before: Mapping[int, Resident]) -> None:
        """before: the adapters of the last report, some of which may be gone."""
        known = {**before, **self._residency.adapters}
        for adapter_id, count in self._residency.evictions.items():
            name = known[adapter_id].name if adapter_id in known else OTHER
            self.metrics.count("scute:adapter_evictions_total", name, count)
        running: set[str] = set()
        if self._requests is not None:
            self._requests.count_running()
            running = self._requests.names()
        self.metrics.show(self._residency, self._num_slots)
        self.metrics.keep(running.union(found.name for found in self._residency.adapters.values()))

    def _count(self, adapter_name: str, prompt_tokens: int, generation_tokens: int) -> None:
        self.metrics.count("scute:adapter_prompt_tokens_total", adapter_name, prompt_tokens)
        self.metrics.count("scute:adapter_generation_tokens_total", adapter_name, generation_tokens)


def observer_of(engine: Any) -> Observer | None:
    """Of an engine client that serves adapters."""
    found: Observer | None = getattr(engine, _NAME, None)
    return found


def observe(init: Callable[..., None]) -> Callable[..., None]:
    """Of `AsyncLLM`: with an observer."""

    @functools.wraps(init)
    def observed(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self.vllm_config.lora_config is not None:
            setattr(self, _NAME, Observer(self))

    return observed


def time_loads(add_lora: Callable[..., Any]) -> Callable[..., Any]:
    """Of `AsyncLLM`: the time of a load, or the code of its refusal, for the observer."""

    @functools.wraps(add_lora)
    async def timed(self: Any, lora_request: LoRARequest) -> Any:
        observer = observer_of(self)
        if observer is None:
            return await add_lora(self, lora_request)
        is_new = lora_request.load_inplace or not Admissions.of(self).has(lora_request)
        start = time.perf_counter()
        try:
            result = await add_lora(self, lora_request)
        except Exception as error:
            refusal = find_refusal(str(error))
            if refusal is not None:
                observer.metrics.count_refusal(refusal.code)
            raise
        observer.loaded(lora_request, time.perf_counter() - start, is_new=is_new)
        return result

    return timed


def refresh_on_scrape(attach_router: Callable[..., Any]) -> Callable[..., Any]:
    """Of the API server: figures of the moment at /metrics."""

    @functools.wraps(attach_router)
    def attaching(app: Any) -> Any:
        app.add_middleware(_RefreshOnScrape)
        return attach_router(app)

    return attaching


class _RefreshOnScrape:
    """Lets every request pass, and asks the engine first where /metrics is read."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"].rstrip("/").endswith("/metrics"):
            observer = observer_of(getattr(scope["app"].state, "engine_client", None))
            if observer is not None:
                await observer.refresh()
        await self.app(scope, receive, send)


def show_methods(show_available_models: Callable[..., Any]) -> Callable[..., Any]:
    """Of the model list: the method and rank of every adapter, as fields that OpenAI's cards do not have."""

    @functools.wraps(show_available_models)
    async def showing(self: Any) -> Any:
        models = await show_available_models(self)
        observer = observer_of(self.engine_client)
        residents = {} if observer is None else await observer.residents()
        for card in models.data:
            request = self.lora_requests.get(card.id)
            found = None if request is None else residents.get(request.lora_int_id)
            if found is not None:
                card.method, card.rank = found.method, found.rank
        return models

    return showing

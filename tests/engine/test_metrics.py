"""The metrics of adapters and who fills them, without an engine."""

import asyncio
import os
import subprocess
import sys
import textwrap
import weakref
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, multiprocess
from vllm.lora.request import LoRARequest

from scute.engine import observation
from scute.engine.admissions import Admissions
from scute.engine.metrics import FAMILIES, OTHER, Metrics
from scute.engine.observation import Observer
from scute.engine.request_tokens import CountedRequests
from scute.engine.residency import Residency, Resident, merge
from scute.errors import Code, Refusal

GENERATED = "scute:adapter_generation_tokens_total"


def resident(name: str, method: str = "LoRA", rank: int = 8, *, active: bool = False) -> Resident:
    return Resident(name, method, rank, disk_bytes=10, host_bytes=20, is_active=active, is_pinned=False)


def residency(*adapters: Resident) -> Residency:
    return Residency(dict(enumerate(adapters, start=1)), {}, device_bytes=100, host_bytes=1000)


def samples(registry: CollectorRegistry, name: str, label: str = "adapter_name") -> dict[str, float]:
    """Values by one label; the others must not tell two samples apart."""
    found = [s for family in registry.collect() for s in family.samples if s.name == name]
    values = {s.labels[label]: s.value for s in found}
    assert len(values) == len(found)
    return values


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry) -> Metrics:
    return Metrics("base", "0", limit=2, registry=registry)


def test_adapters_beyond_the_limit_are_summed(metrics, registry):
    metrics.show(residency(*[resident(f"tenant-{i}", active=True) for i in range(1, 6)]), num_slots=8)
    for i in range(1, 6):
        metrics.count(GENERATED, f"tenant-{i}", i)
    assert samples(registry, "vllm:lora_adapter_loaded") == {"tenant-1": 1, "tenant-2": 1, OTHER: 3}
    assert samples(registry, "scute:adapter_info") == {"tenant-1": 1, "tenant-2": 1, OTHER: 3}
    assert samples(registry, GENERATED) == {"tenant-1": 1, "tenant-2": 2, OTHER: 12}
    sizes = [s for f in registry.collect() for s in f.samples if s.name == "scute:adapter_bytes"]
    others = {s.labels["tier"]: s.value for s in sizes if s.labels["adapter_name"] == OTHER}
    assert others == {"disk": 30, "host": 60, "device": 60}
    assert registry.get_sample_value(
        "vllm:num_gpu_loaded_lora_adapters", {"model_name": "base", "engine": "0"}
    ) == pytest.approx(5)


def test_a_thousand_adapters_have_as_many_series_as_the_limit_lets(metrics, registry):
    names = [f"tenant-{i}" for i in range(1, 1001)]
    metrics.show(residency(*map(resident, names)), num_slots=8)
    for name in names:
        metrics.observe_load(name, 0.5)
        metrics.count(GENERATED, name, 1)
    labels = {s.labels.get("adapter_name") for family in registry.collect() for s in family.samples}
    assert labels == {None, "tenant-1", "tenant-2", OTHER}


def test_a_limit_of_zero_tells_no_adapter_apart(registry):
    metrics = Metrics("base", "0", limit=0, registry=registry)
    metrics.show(residency(resident("a"), resident("b")), num_slots=2)
    assert samples(registry, "vllm:lora_adapter_loaded") == {OTHER: 2}


def test_the_level_and_the_rank_leave_no_old_series(metrics, registry):
    for found in (resident("a"), resident("a", active=True), resident("a", "DoRA", rank=16)):
        metrics.show(residency(found), num_slots=2)
        assert samples(registry, "vllm:lora_adapter_loaded", "level") == {"gpu" if found.is_active else "cpu": 1}
        assert samples(registry, "vllm:lora_adapter_loaded", "rank") == {str(found.rank): 1}
        assert samples(registry, "scute:adapter_info", "method") == {found.method: 1}
    metrics.show(residency(), num_slots=2)
    assert samples(registry, "vllm:lora_adapter_loaded") == {}


def test_a_label_is_free_again(metrics, registry):
    for name in ("a", "b", "c"):
        metrics.count(GENERATED, name, 1)
    metrics.keep({"b", "c"})
    assert samples(registry, GENERATED) == {"a": 1, "b": 1, OTHER: 1}, "its last figures are seen"
    metrics.keep({"b", "c"})
    assert samples(registry, GENERATED) == {"b": 1, OTHER: 1}
    metrics.count(GENERATED, "c", 5)
    assert samples(registry, GENERATED) == {"b": 1, "c": 5, OTHER: 1}


def test_a_second_engine_client_takes_the_names_over():
    """As a test, or a script that makes one engine after the other, has it."""
    for _ in range(2):
        Metrics("base", "0", limit=2).show(residency(resident("a")), num_slots=2)
    assert samples(prometheus_client.REGISTRY, "scute:adapter_info") == {"a": 1}


def test_where_statistics_are_off_nothing_is_registered():
    before = set(prometheus_client.REGISTRY._collector_to_names)
    Metrics("base", "0", limit=2, registry=None).show(residency(resident("a")), num_slots=2)
    assert set(prometheus_client.REGISTRY._collector_to_names) == before


PROCESS = """
    from scute.engine.metrics import Metrics
    from scute.engine.residency import Residency, Resident
    metrics = Metrics("base", "0", limit=1)
    one, two = (Resident(name, "LoRA", 8, 10, 20, True, False) for name in "ab")
    for adapters in ({1: one, 2: two}, {1: one}, {}):
        metrics.show(Residency(adapters, {}, 100, 1000), 2)
        metrics.count("scute:adapter_prompt_tokens_total", "a", 3)
        metrics.count("scute:adapter_prompt_tokens_total", "b", 4)
        metrics.keep(set())
"""


def test_of_several_api_servers_counts_add_up_and_the_last_gauge_stands(tmp_path):
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(PROCESS)],
            env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
            check=True,
        )
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    assert samples(registry, "scute:adapter_prompt_tokens_total") == {"a": 18, OTHER: 24}
    assert set(samples(registry, "scute:adapter_info").values()) == {0}


def test_ranks_are_summed():
    def rank(host: int, rank: int, evictions: list[tuple[int, int]]) -> dict[str, Any]:
        adapters = [(7, "a", "VeRA", rank, 10, host, True, True)]
        return {"adapters": adapters, "evictions": evictions, "device_bytes": 100, "host_bytes": 1000}

    merged = merge([rank(20, 8, [(7, 2), (8, 1)]), rank(30, 16, [(7, 2)])])
    assert merged == Residency({7: Resident("a", "VeRA", 16, 10, 50, True, True)}, {7: 2, 8: 1}, 200, 1000)
    assert merged.adapters[7].device_bytes == 50


class Tokens:
    """vLLM's request states and a record of what was counted."""

    def __init__(self) -> None:
        self.states: dict[str, Any] = {}
        self.counted: dict[str, list[int]] = {}
        self.requests = CountedRequests(self.states, self._count)

    def _count(self, name: str, prompt: int, generated: int) -> None:
        total = self.counted.setdefault(name, [0, 0])
        total[0], total[1] = total[0] + prompt, total[1] + generated

    def start(self, request: str, name: str | None, prompt: int) -> Any:
        state = SimpleNamespace(
            lora_name=name, prompt_len=prompt, is_prefilling=True, stats=SimpleNamespace(num_generation_tokens=0)
        )
        self.states[request] = state
        self.requests.request_waiting(request, name)
        self.requests.request_running(request, name)
        return state


def test_tokens_are_counted_once_whenever_one_looks():
    tokens = Tokens()
    state = tokens.start("r", "a", prompt=30)
    tokens.requests.count_running()
    assert tokens.counted == {"a": [0, 0]}
    for generated in (1, 5):
        state.is_prefilling, state.stats.num_generation_tokens = False, generated
        tokens.requests.count_running()
        assert tokens.counted == {"a": [30, generated]}
    tokens.requests.request_waiting("r", "a")  # preempted
    tokens.requests.request_running("r", "a")
    state.stats.num_generation_tokens = 9
    del tokens.states["r"]
    tokens.requests.request_finished("r", "a")
    tokens.requests.request_finished("r", "a")
    tokens.requests.count_running()
    assert tokens.counted == {"a": [30, 9]}
    assert tokens.requests.requests == {}
    assert tokens.requests.names() == set()


def test_tokens_of_aborted_requests_and_of_the_base_model():
    tokens = Tokens()
    tokens.start("base", None, prompt=30).stats.num_generation_tokens = 7
    tokens.start("early", "a", prompt=30)
    for request, name in (("base", None), ("early", "a"), ("never-scheduled", "a")):
        tokens.states.pop(request, None)
        tokens.requests.request_finished(request, name)
    assert tokens.counted == {"a": [0, 0]}


class Engine:
    """An engine client whose workers answer `reports`, or raise or wait."""

    def __init__(self, *reports: Any) -> None:
        self.vllm_config = SimpleNamespace(
            lora_config=SimpleNamespace(max_loras=2),
            model_config=SimpleNamespace(served_model_name="base"),
            additional_config={"scute": {"metrics_adapters": 2}},
        )
        self.engine_core = SimpleNamespace(engine_ranks_managed=[0])
        self.output_processor = SimpleNamespace(request_states={}, lora_states=None)
        self.log_stats = True
        self.reports = list(reports)
        self.asked = 0

    async def collective_rpc(self, method: str) -> Any:
        assert method == "scute_report"
        self.asked += 1
        answer = self.reports[0] if len(self.reports) == 1 else self.reports.pop(0)
        if isinstance(answer, Exception):
            raise answer
        await asyncio.sleep(answer.get("seconds", 0))
        return [answer]


NAMES = {1: "a", 2: "b"}


def told(*ids: int, evictions: tuple[tuple[int, int], ...] = (), **more: Any) -> dict[str, Any]:
    adapters = [(i, NAMES[i], "LoRA", 8, 10, 20, True, False) for i in ids]
    return {"adapters": adapters, "evictions": evictions, "device_bytes": 100, "host_bytes": 1000, **more}


def request(name: str, adapter_id: int) -> LoRARequest:
    return LoRARequest(name, adapter_id, f"/{name}")


def shown(name: str) -> dict[str, float]:
    return samples(prometheus_client.REGISTRY, name)


def test_the_last_figures_of_an_adapter_are_seen_once():
    observer = Observer(Engine(told(1, 2), told(2, evictions=((1, 3),)), told(2)))
    for name, adapter_id in (("a", 1), ("b", 2)):
        observer.loaded(request(name, adapter_id), 0.5, is_new=True)
    evicted = []
    for _ in range(3):
        asyncio.run(observer.refresh())
        evicted.append(shown("scute:adapter_evictions_total"))
    assert evicted == [{"a": 0, "b": 0}, {"a": 3, "b": 0}, {"b": 0}]
    assert shown("vllm:lora_adapter_loaded") == {"b": 1}


def test_a_name_is_not_forgotten_while_its_adapter_is_loaded_again():
    observer = Observer(Engine(told(1)))
    for adapter_id in (2, 1):
        observer.loaded(request("a", adapter_id), 0.5, is_new=True)
    for _ in range(3):
        asyncio.run(observer.refresh())
    assert shown("scute:adapter_load_seconds_count") == {"a": 2}
    assert shown("vllm:lora_adapter_loaded") == {"a": 1}


class Name(str):
    """One that can be seen to be gone."""

    __slots__ = ("__weakref__",)


def test_loads_that_nobody_looks_at_leave_nothing_but_labels():
    observer, kept = Observer(Engine(told())), weakref.WeakSet()
    for number in range(1, 1001):
        loaded = request(Name(f"tenant-{number}"), number)
        kept.add(loaded.lora_name)
        observer.loaded(loaded, 0.5, is_new=True)
    del loaded
    assert len(kept) <= 2


def test_many_who_look_ask_once(monkeypatch):
    engine = Engine(told(1, seconds=0.05))
    observer = Observer(engine)

    async def look() -> None:
        await asyncio.gather(*[observer.refresh() for _ in range(5)])

    asyncio.run(look())
    assert engine.asked == 1
    monkeypatch.setattr(observation, "PATIENCE_SECONDS", 0.01)
    assert asyncio.run(observer.residents()).keys() == {1}
    assert engine.asked == 1, "nothing was loaded since"


def test_cards_know_the_last_load(monkeypatch):
    """A scrape has asked before it, and the engine takes longer than a scrape waits."""
    monkeypatch.setattr(observation, "PATIENCE_SECONDS", 0.01)
    observer = Observer(Engine(told(1, seconds=0.1), told(1, 2, seconds=0.1)))

    async def look() -> Any:
        await observer.refresh()
        observer.loaded(request("b", 2), 0.5, is_new=True)
        return await observer.residents()

    assert asyncio.run(look()).keys() == {1, 2}


def test_an_engine_that_is_slow_or_gone_stops_nobody(monkeypatch):
    monkeypatch.setattr(observation, "PATIENCE_SECONDS", 0.05)
    observer = Observer(Engine(told(1), told(1, seconds=60), RuntimeError("the engine is dead")))
    observer.loaded(request("a", 1), 0.5, is_new=True)
    for _ in range(3):
        asyncio.run(observer.refresh())
        assert shown("vllm:lora_adapter_loaded") == {"a": 1}


@pytest.mark.parametrize(
    ("error", "codes"),
    [(RuntimeError(f"Call failed: {Refusal(Code.TENSOR_MISSING, 'no tensor')}"), {"tensor.missing": 1}), (OSError, {})],
)
def test_refused_loads_are_counted_by_code(error, codes):
    async def add_lora(*_: Any) -> bool:
        raise error

    engine = Engine(told())
    engine._scute_observer = Observer(engine)
    timed = observation.time_loads(add_lora)
    with pytest.raises((RuntimeError, OSError)):
        asyncio.run(timed(engine, request("a", 1)))
    assert samples(prometheus_client.REGISTRY, "scute:adapter_refusals_total", "code") == codes
    assert shown("scute:adapter_load_seconds_count") == {}


def test_a_call_for_an_adapter_that_is_there_is_no_load():
    async def add_lora(engine: Any, lora_request: LoRARequest) -> bool:
        lora_request.load_inplace = False  # as the admission leaves it
        Admissions.of(engine).remember(lora_request)
        return True

    engine = Engine(told(1))
    engine._scute_observer = Observer(engine)
    first, again, in_place = request("a", 1), request("a", 1), request("a", 1)
    in_place.load_inplace = True
    for each in (first, again, in_place):
        asyncio.run(observation.time_loads(add_lora)(engine, each))
    assert shown("scute:adapter_load_seconds_count") == {"a": 2}


def test_without_adapters_there_is_no_observer():
    class Client:
        __init__ = observation.observe(lambda self, config: setattr(self, "vllm_config", config))

    client = Client(SimpleNamespace(lora_config=None))
    assert observation.observer_of(client) is None


def test_every_name_is_prometheus_like():
    for family in FAMILIES:
        assert family.name.startswith(("vllm:", "scute:adapter_"))
        assert family.name.endswith("_total") is (family.kind == "counter")
        assert family.meaning.endswith(".")

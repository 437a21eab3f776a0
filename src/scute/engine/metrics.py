"""The metrics of adapters, beside vLLM's own at /metrics: what there is, and the objects that hold it.

The names that start with `vllm:` are those proposed to vLLM (its pull request 54830); it has none of them so far.
"""

import itertools
import os
from collections import Counter
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry

from scute.engine.residency import Residency

OTHER = "_other"
"""The label that the adapters without one of their own have in common."""

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. kind: gauge, counter or histogram; unit: of its value; meaning: one sentence."""

    name: str
    kind: str
    labels: tuple[str, ...]
    unit: str
    meaning: str

    def make(self, registry: CollectorRegistry | None) -> Any:
        if self.kind == "gauge":
            # Of several API servers, all of which see the same engine, the last that asked it is right.
            return prometheus_client.Gauge(
                self.name, self.meaning, self.labels, registry=registry, multiprocess_mode="mostrecent"
            )
        if self.kind == "counter":
            return prometheus_client.Counter(self.name, self.meaning, self.labels, registry=registry)
        return prometheus_client.Histogram(self.name, self.meaning, self.labels, registry=registry, buckets=SECONDS)


_ENGINE = ("model_name", "engine")
_ADAPTER = ("model_name", "adapter_name")

FAMILIES = (
    Family(
        "vllm:lora_adapter_loaded",
        "gauge",
        (*_ENGINE, "adapter_name", "level", "pinned", "rank"),
        "adapters",
        "1 for every loaded adapter, at the level it is at: gpu if it has a slot, else cpu.",
    ),
    Family("vllm:num_gpu_loaded_lora_adapters", "gauge", _ENGINE, "adapters", "Adapters that have a slot."),
    Family("vllm:max_gpu_lora_adapters", "gauge", _ENGINE, "adapters", "Slots for adapters, which is --max-loras."),
    Family(
        "vllm:lora_adapter_load_seconds",
        "histogram",
        _ENGINE,
        "seconds",
        "Time that the loads of adapters took, as the caller waits for it.",
    ),
    Family("scute:adapter_info", "gauge", (*_ADAPTER, "method"), "adapters", "1 for every loaded adapter."),
    Family(
        "scute:adapter_bytes",
        "gauge",
        (*_ADAPTER, "tier"),
        "bytes",
        "What a loaded adapter takes: its file (disk), its packed form (host), and the arena (device).",
    ),
    Family(
        "scute:adapter_limit_bytes",
        "gauge",
        ("model_name", "tier"),
        "bytes",
        "What all adapters may take: of disk by host_memory_gib, of device by the size of the arenas.",
    ),
    Family(
        "scute:adapter_load_seconds",
        "histogram",
        _ADAPTER,
        "seconds",
        "Time that the loads of the adapter took, as the caller waits for it.",
    ),
    Family("scute:adapter_evictions_total", "counter", _ADAPTER, "evictions", "How often it lost its slot to another."),
    Family("scute:adapter_prompt_tokens_total", "counter", _ADAPTER, "tokens", "Prompt tokens of its requests."),
    Family(
        "scute:adapter_generation_tokens_total", "counter", _ADAPTER, "tokens", "Tokens generated for its requests."
    ),
    Family(
        "scute:adapter_refusals_total", "counter", ("model_name", "code"), "loads", "Loads that were refused, by code."
    ),
)

_COUNTED = tuple(f.name for f in FAMILIES if f.labels == _ADAPTER)

_registered: list[Any] = []
"""The objects of the last engine client of this process, which vLLM lets make another one."""


class Metrics:
    """The metrics of one engine client, for at most `limit` adapters with labels of their own.

    A label is given to whoever is there first, and is free again at the second `keep` without its adapter: its last
    figures are seen.
    """

    def __init__(
        self, model_name: str, engine: str, limit: int, registry: CollectorRegistry | None = prometheus_client.REGISTRY
    ) -> None:
        """registry: None keeps them to itself, as where vLLM's statistics are off."""
        if registry is not None:
            _unregister(registry)
        self._model_name, self._engine, self._limit = model_name, engine, limit
        self._families = {family.name: family.make(registry) for family in FAMILIES}
        self._shown: dict[str, Set[tuple[str, ...]]] = {}
        self._own: set[str] = set()
        self._gone: set[str] = set()
        self._keeps_series = "PROMETHEUS_MULTIPROC_DIR" in os.environ  # files, which forget nothing
        if registry is not None:
            _registered.extend(self._families.values())

    def count(self, family: str, adapter_name: str, amount: int) -> None:
        """Add to a counter of FAMILIES that has the labels of an adapter."""
        self._families[family].labels(self._model_name, self.label_of(adapter_name)).inc(amount)

    def count_refusal(self, code: str) -> None:
        self._families["scute:adapter_refusals_total"].labels(self._model_name, code).inc()

    def observe_load(self, adapter_name: str, seconds: float) -> None:
        self._families["vllm:lora_adapter_load_seconds"].labels(self._model_name, self._engine).observe(seconds)
        own = self._families["scute:adapter_load_seconds"]
        own.labels(self._model_name, self.label_of(adapter_name)).observe(seconds)

    def label_of(self, adapter_name: str) -> str:
        """Its own name, or that of all others where `limit` adapters have one."""
        if adapter_name not in self._own:
            if len(self._own) >= self._limit or adapter_name == OTHER:
                return OTHER
            self._own.add(adapter_name)
        return adapter_name

    def keep(self, adapter_names: Set[str]) -> None:
        """Forget the series of every other adapter that the last call did not name either."""
        if self._keeps_series:
            return
        gone = self._own - adapter_names
        for label, name in itertools.product(gone & self._gone, _COUNTED):
            self._families[name].remove(self._model_name, label)
        self._own -= gone & self._gone
        self._gone = gone - self._gone

    def show(self, residency: Residency, num_slots: int) -> None:
        """Set every gauge."""
        loaded: Counter[tuple[str, ...]] = Counter()
        info: Counter[tuple[str, ...]] = Counter()
        taken: Counter[tuple[str, ...]] = Counter()
        for found in residency.adapters.values():
            label = self.label_of(found.name)
            level, pinned, rank = "gpu" if found.is_active else "cpu", str(found.is_pinned).lower(), str(found.rank)
            loaded[label, level, *(("", "") if label == OTHER else (pinned, rank))] += 1
            info[label, found.method] += 1
            sizes = {"disk": found.disk_bytes, "host": found.host_bytes, "device": found.device_bytes}
            for tier, size in sizes.items():
                taken[label, tier] += size
        self._set("vllm:lora_adapter_loaded", {(self._engine, *labels): count for labels, count in loaded.items()})
        for label, name in itertools.product({label for label, *_ in loaded}, _COUNTED):
            self._families[name].labels(self._model_name, label)  # a rate needs the zero that it starts from
        num_active = sum(found.is_active for found in residency.adapters.values())
        self._set("vllm:num_gpu_loaded_lora_adapters", {(self._engine,): num_active})
        self._set("vllm:max_gpu_lora_adapters", {(self._engine,): num_slots})
        self._set("scute:adapter_info", info)
        self._set("scute:adapter_bytes", taken)
        self._set("scute:adapter_limit_bytes", {("disk",): residency.host_bytes, ("device",): residency.device_bytes})

    def _set(self, name: str, values: Mapping[tuple[str, ...], int]) -> None:
        family, shown = self._families[name], self._shown.get(name, set())
        for labels in shown - values.keys():
            if self._keeps_series:
                family.labels(self._model_name, *labels).set(0)
            else:
                family.remove(self._model_name, *labels)
        for labels, value in values.items():
            family.labels(self._model_name, *labels).set(value)
        self._shown[name] = set(values)


def _unregister(registry: CollectorRegistry) -> None:
    while _registered:
        with suppress(KeyError):  # vLLM removes those named vllm: itself
            registry.unregister(_registered.pop())

"""One line of results: what was timed, whether it was right, and only then how long it took."""

import json
from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator
from rows import Environment, Record

from scute.tuning.timing import Samples
from scute.tuning.truth import Verdict


class Correctness(Record):
    """Against float64 on sampled rows: the largest error of a row of a slice, as a share of its norm.

    graph_error: the recorded graph against the same work run eagerly.
    """

    worst_error: float
    bound: float
    rows: int
    finite: bool
    graph_error: float
    passed: bool

    @classmethod
    def of(cls, verdict: Verdict, graph_error: float) -> Self:
        passed = verdict.passed and graph_error <= verdict.bound
        return cls(
            worst_error=verdict.worst,
            bound=verdict.bound,
            rows=verdict.rows,
            finite=verdict.finite,
            graph_error=graph_error,
            passed=passed,
        )


class Time(Record):
    """Milliseconds of one step over all layers: median, 20th and 80th percentile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Samples, scale: float = 1.0) -> Self:
        return cls(median=scale * samples.median, low=scale * samples.low, high=scale * samples.high)


class Performance(Record):
    """Times of one step, scaled to all layers of the model where `layers_timed` were recorded.

    step: base GEMMs and adapters; base: base GEMMs alone, in turn with it; adapters: the difference. alone: the
    adapter kernels without any base GEMM. launches: kernels of `step` less those of `base`, and of `alone`.
    bound: bytes over bandwidth plus launches times the cost of one. kernels: ms by kernel, from one profiled replay.
    """

    layers_timed: int
    step: Time | None = None
    base: Time | None = None
    adapters: float | None = None
    alone: Time
    step_launches: int | None = None
    alone_launches: int | None = None
    bytes: int
    bytes_ms: float
    bound: float | None = None
    alone_bound: float | None = None
    kernels: dict[str, float]


class Constants(Record):
    """bandwidth, cached_bandwidth: bytes a second of a copy through device memory and within L2; launch: ms."""

    benchmark: Literal["constants"] = "constants"
    environment: Environment
    bandwidth: float
    cached_bandwidth: float
    l2_bytes: int
    launch: float


class Row(Record):
    """engine: scute, stock (vLLM's kernels as shipped) or stock-tuned (after a grid search)."""

    benchmark: Literal["kernels"] = "kernels"
    case: str
    engine: Literal["scute", "stock", "stock-tuned"]
    tokens: int
    layers: int
    tenants: int
    dtype: str
    dry: bool
    environment: Environment
    correctness: Correctness | None = None
    performance: Performance | None = None
    problem: str | None = None

    @model_validator(mode="after")
    def _no_time_without_proof(self) -> Self:
        if self.performance is not None and (self.correctness is None or not self.correctness.passed):
            raise ValueError("a row has a time although its result was not shown to be right")
        return self


class RouteRow(Record):
    """A way to apply DoRA's scale, on one projection: its time, that of the plain expand, and the byte model's.

    added_bytes, added_launches: what Proposition 2 adds to the plain schedule; predicted: plain + bytes / bandwidth +
    launches times the cost of one. Times are microseconds a layer. expand_ratio: of the expand kernels alone, where the
    route changes nothing else.
    """

    benchmark: Literal["routes"] = "routes"
    route: str
    projection: str
    tokens: int
    dtype: str
    dry: bool
    environment: Environment
    plain: float
    time: float
    ratio: float
    expand_ratio: float | None
    added_bytes: int
    added_launches: int
    predicted: float
    bytes_dominate: bool
    correctness: Correctness

    @model_validator(mode="after")
    def _no_time_without_proof(self) -> Self:
        if not self.correctness.passed:
            raise ValueError("a row has a time although its result was not shown to be right")
        return self


def append(path: Path, row: Record) -> None:
    with path.open("a") as file:
        file.write(row.model_dump_json() + "\n")


def read(path: Path) -> list[Row | RouteRow | Constants]:
    kinds: dict[str, type[Row] | type[RouteRow] | type[Constants]] = {
        "kernels": Row,
        "routes": RouteRow,
        "constants": Constants,
    }
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [kinds[line["benchmark"]].model_validate(line) for line in lines]

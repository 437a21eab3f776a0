"""Engines of a plan, started side by side, each with its tenants loaded and its check batch served."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any

import rows

from serving import checks, engines, loads, plans
from serving.plans import Block, Cell, Plan
from serving.pools import POOLS
from serving.processes import Child, Failed

BASE = "base"
NOT_TUNED = "no folder with tuned configurations was given: --tuned"


@dataclass(frozen=True, slots=True)
class Settings:
    """Of a run. engine: further arguments of every engine.

    seconds: after which no further round starts. start_seconds: after which an engine that is not ready is given up.
    requests: of every stream, the plan's number if None. repetitions: of every block, likewise.
    profile: whether engines get vLLM's profiler.
    """

    work: Path
    out: Path
    logs: Path
    model: str
    layers: int | None
    dtype: str
    seconds: float
    start_seconds: float
    tuned: Path | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    requests: int | None = None
    repetitions: int | None = None
    profile: bool = False


@dataclass(slots=True)
class Engine:
    """An engine that is ready. served: what it answered to the check batch, by pool and variant."""

    child: Child
    record: rows.Engine
    served: dict[tuple[str, str], list[list[float]]]


class Session:
    """The processes of a plan. problems: why an engine, or "preparation", is not there."""

    def __init__(self, settings: Settings, plan: Plan, say: Callable[[str], None]) -> None:
        self.settings = settings
        self.plan = plan
        self.say = say
        self.environment = rows.Environment.here()
        self.deadline = time.monotonic() + settings.seconds
        self.ready_by = time.monotonic() + min(settings.seconds, settings.start_seconds)
        self.engines: dict[str, Engine] = {}
        self.problems: dict[str, str] = {}
        self.vocabulary = 0
        self._scores: dict[str, Any] = {}
        self.folders: dict[str, Path] = {}
        self._base = Path()
        self._has_base, self._has_tenants = Event(), Event()
        self._children: list[Child] = []

    def __enter__(self) -> "Session":
        names = plans.engines_of(self.plan)
        if self.settings.tuned is None or not list(self.settings.tuned.glob("*_SHRINK.json")):
            self.problems = {name: NOT_TUNED for name in names if engines.ENGINES[name].tuned}
        with ThreadPoolExecutor(len(names) + 1) as pool:
            try:
                preparation = self._spawn("serving.preparation", "preparation", {})
                tasks: dict[Future[Any], str] = {pool.submit(self._prepare, preparation): "preparation"}
                for name in names:
                    if name not in self.problems:
                        tasks[pool.submit(self._start, name, self._spawn_engine(name, len(names)))] = name
                self._collect(tasks)
                preparation.stop()
            except BaseException:
                self.__exit__()  # first, so that no task waits for a child any longer
                raise
        return self

    def _collect(self, tasks: Mapping[Future[Any], str]) -> None:
        for task in as_completed(tasks):
            name = tasks[task]
            try:
                ready = task.result()
            except Failed as problem:
                self.problems[name] = str(problem)
                self.say(f"{name}: {problem}")
            else:
                if ready is not None:
                    self.engines[name] = ready

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.close()
        for child in self._children:
            child.stop()

    def _spawn(self, module: str, name: str, environment: Mapping[str, str]) -> Child:
        child = Child(module, self.settings.logs / f"{name}.log", {**engines.inherited(), **environment})
        self._children.append(child)
        return child

    def _spawn_engine(self, name: str, count: int) -> Child:
        environment = {
            "OMP_NUM_THREADS": str(max(1, self.environment.cores // count)),
            "VLLM_CACHE_ROOT": str(self.settings.work / f"cache-{name}"),
            **engines.ENGINES[name].environment(self.settings.tuned),
        }
        return self._spawn("serving.worker", name, environment)

    def _prepare(self, child: Child) -> None:
        """The base model, the tenants, and what PEFT says about them; engines wait for the first two."""
        settings = self.settings
        try:
            given = (settings.work, settings.model, settings.layers, settings.dtype)
            self._base, self.vocabulary = child.ask(self.ready_by, "start", *given)
            self.say("the base model is written")
            self._has_base.set()
            names = list(dict.fromkeys(t for e in plans.engines_of(self.plan) for t in plans.tenants_of(self.plan, e)))
            self.folders = child.ask(self.ready_by, "write_tenants", names)
            self.say(f"{len(names)} tenants are written")
            self._has_tenants.set()
            self._scores = child.ask(self.ready_by, "scores", names)
            self.say("the PEFT library has answered")
        finally:
            self._has_base.set()
            self._has_tenants.set()

    def _start(self, name: str, child: Child) -> Engine:
        kind = engines.ENGINES[name]
        tenants = plans.tenants_of(self.plan, name)
        self._has_base.wait()
        if not self.vocabulary:
            raise Failed("there is no base model")
        arguments = {"dtype": self.settings.dtype, **self._arguments(kind, len(tenants))}
        if self.settings.profile:
            arguments["profiler_config"] = engines.profiler(self.environment.device == "CPU")
        tokens, seconds = child.ask(self.ready_by, "start", self._with_folders(name, arguments))
        self.say(f"{name} has started in {seconds:.0f} s")
        self._has_tenants.wait()
        if missing := [tenant for tenant in tenants if tenant not in self.folders]:
            raise Failed(f"{missing[0]} was not written")
        start = time.monotonic()
        child.ask(self.ready_by, "admit", {tenant: self.folders[tenant] for tenant in tenants})
        loaded = time.monotonic()
        served = {}
        for pool, variant in plans.served(self.plan, name):
            batch = checks.mixed_batch(pool.distinct(variant), self.vocabulary)
            served[pool.name, variant] = child.ask(self.ready_by, "score", batch, kind.scores_prompts)
        self.say(
            f"{name} took {loaded - start:.0f} s to load its tenants, {time.monotonic() - loaded:.0f} s for checks"
        )
        record = rows.Engine(
            name=name,
            scute=kind.scute,
            arguments=arguments,
            environment={key: Path(value).name for key, value in kind.environment(self.settings.tuned).items()},
            kv_cache_tokens=tokens,
        )
        engine = Engine(child, record, served)
        self.warm_up(name, engine, self.plan[0])
        return engine

    def _with_folders(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What the engine starts with; its row leaves folders out."""
        placed = {"model": str(self._base), **arguments}
        if self.settings.profile:
            folder = (self.settings.work / f"profile-{name}").resolve()
            placed["profiler_config"] = {**arguments["profiler_config"], "torch_profiler_dir": str(folder)}
        return placed

    def _arguments(self, kind: engines.EngineKind, held: int) -> dict[str, Any]:
        if self.environment.device != "CPU":
            # The cache holds a full batch of the longest requests. The share is what has to be free at the start.
            sizes: dict[str, Any] = {"kv_cache_memory_bytes": 5 * 2**29, "gpu_memory_utilization": 0.05}
            return kind.arguments(held) | sizes | dict(self.settings.engine)
        # vLLM 0.32 on a CPU gives base rows the adapter of the last slot if all are full; tiny adapters need no 8 GiB.
        sizes = {"kv_cache_memory_bytes": 2**28, "gpu_memory_utilization": 0.05, "enforce_eager": True}
        small = replace(kind, options={k: v for k, v in kind.options.items() if k != "adapter_memory_gib"})
        return small.arguments(held, spare=max(1, held + 1 - kind.loras)) | sizes | dict(self.settings.engine)

    def warm_up(self, name: str, engine: Engine, block: Block) -> None:
        """An untimed stream of every shape that the engine will be timed with: one full batch of requests."""
        start = time.monotonic()
        for cell in block.cells:
            for variant in (variant for engine_name, variant in cell.arms if engine_name == name):
                pool = POOLS[cell.pool]
                count = min(self.requests(cell), max(engines.SEQUENCES, pool.size))
                drawn = loads.draw(cell.load, count, pool.size, self.vocabulary, -1)
                engine.child.ask(self.deadline, "stream", drawn, pool.tenants[variant])
        self.say(f"{name} has warmed up in {time.monotonic() - start:.0f} s")

    def lose(self, name: str, problem: str) -> None:
        """An engine that failed is asked for nothing more."""
        self.engines.pop(name, None)
        self.problems[name] = problem
        self.say(f"{name} is lost: {problem}")

    def requests(self, cell: Cell) -> int:
        return self.settings.requests or cell.requests

    def correctness(self, name: str, pool: str, variant: str) -> rows.Correctness | str:
        """Of an engine in a pool, or a sentence that says why it is not known."""
        engine = self.engines.get(name)
        if engine is None:
            return self.problems.get(name, "the engine is not there")
        if not self._scores:
            return f"nothing to compare with: {self.problems.get('preparation')}"
        batch = checks.mixed_batch(POOLS[pool].distinct(variant), self.vocabulary)
        try:
            return checks.correctness(batch, engine.served[pool, variant], self._scores, BASE)
        except ValueError as error:
            return str(error)

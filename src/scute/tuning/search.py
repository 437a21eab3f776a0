"""The search: candidates compiled side by side, then checked against float64 and timed one after another."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch

from scute.costs import Device
from scute.kernels.sizes import STEPWISE, may_set, overridden
from scute.tuning.candidates import known, merge, neighbours
from scute.tuning.compilers import Compilers
from scute.tuning.floor import floor_us
from scute.tuning.layers import Adapter, LayerShape
from scute.tuning.problems import FOLLOW_THE_BATCH, Instance, Problem, argument_names, asked, using
from scute.tuning.table import Arguments, Entry
from scute.tuning.timing import Clock

FINALISTS = 5
WORTH = 0.99
"""A candidate must take at most this share of the time of what it replaces: less is noise."""
HOPELESS = 1.3
"""One that takes this many times as long on one layer is not tried on the others."""
NEAR = 1.1
"""Sizes that take at most this many times what bytes and launches take are good enough: the time goes to others."""


class Progress(Protocol):
    """Told what is being done, and of steps done and to come."""

    def __call__(self, doing: str = "", steps: int = 0, more: int = 0) -> object: ...


class Task(NamedTuple):
    """One candidate on one problem: the sizes of one rule, or None for all as they are."""

    problem: Problem
    rule: str | None
    sizes: Any


@dataclass(frozen=True)
class Settings:
    """tokens: rows of the batches; tenants: adapters in turn; rounds: of neighbours; seconds: for everything."""

    tokens: tuple[int, ...] = (64, 8192)
    tenants: int = 20
    ranks: tuple[int, ...] = (16, 64)
    shared_rank: int = 256
    rotation_width: int = 32
    dtype: torch.dtype = torch.float16
    rounds: int = 3
    seconds: float = 300.0
    processes: int = 8
    copies: int = 8
    repeats: int = 5


@dataclass
class Group:
    """Problems that one entry serves. fields: those that are sought; asked, sizes: of the first problem."""

    rule: str
    arguments: Arguments
    asked: Mapping[str, int]
    sizes: Any
    fields: tuple[str, ...]
    problems: list[Problem] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.rule.removesuffix('_blocks')} for {', '.join(f'{k} {v}' for k, v in self.arguments.items())}"


@dataclass
class Search:
    """One device; groups one after another, each with its share of the time that is left.

    figures: of the byte model; without them no group is near its floor.
    """

    settings: Settings
    device: torch.device
    progress: Progress
    figures: Device | None = None
    entries: list[Entry] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def run(self, shapes: Sequence[LayerShape]) -> list[Entry]:
        """CUDA should not have been used before: then the compiling processes can be forked."""
        deadline = time.monotonic() + self.settings.seconds
        with ExitStack() as stack:
            self._compilers = None
            if self.device.type == "cuda" and self.settings.processes:
                self._compilers = stack.enter_context(Compilers(self.settings.processes, _compile))
            self._clock = Clock(self.device)
            groups = self._groups(list(problems(shapes, self.settings)), deadline)
            for index, group in enumerate(groups):
                left = deadline - time.monotonic()
                if left <= 0:
                    self.skipped.append(str(group))
                    continue
                entry = _Descent(self, group, time.monotonic() + left / (len(groups) - index)).run()
                if entry is None:
                    self.skipped.append(str(group))
                else:
                    self.entries.append(entry)
        return self.entries

    def _groups(self, todo: Sequence[Problem], deadline: float) -> list[Group]:
        """Runs every problem once, and watches what the rules are asked."""
        self.progress("kernels as they are", more=2 * len(todo))
        self.compile([Task(problem, None, None) for problem in todo], deadline)
        groups: dict[tuple[str, ...], Group] = {}
        for problem in todo:
            self.progress(steps=1)
            for rule, (values, sizes) in asked(Instance(problem, 1, self.device)).items():
                named = dict(zip(argument_names(rule), values, strict=True))
                stepwise = {"shared_rank"} if problem.adapter.shared else set()
                arguments: Arguments = {name: v for name, v in named.items() if name not in STEPWISE - stepwise}
                fields = tuple(name for name in sizes._fields if _is_sought(name, arguments))
                if fields:
                    key = rule, str(arguments)
                    groups.setdefault(key, Group(rule, arguments, named, sizes, fields)).problems.append(problem)
        return list(groups.values())

    def compile(self, tasks: Sequence[Task], deadline: float) -> set[Task]:
        """Those that can be run."""
        if self._compilers is None:
            self.progress(steps=len(tasks))
            return set(tasks)
        seconds = max(1.0, deadline - time.monotonic())
        return self._compilers.run(tasks, seconds, lambda: self.progress(steps=1))

    def record_time(self, instance: Instance, group: Group, sizes: Any, repeats: int) -> float:
        """Microseconds of one layer."""
        with using({group.rule: sizes}):
            recorded = self._clock.record(instance.run)
        median = self._clock.time(recorded, repeats=repeats, warm_seconds=0.0)[0].median
        return 1e3 * median / instance.copies


class _Descent:
    """Round after round to the best neighbour, or to what several better ones have in common."""

    def __init__(self, search: Search, group: Group, deadline: float) -> None:
        self.search, self.group, self.deadline = search, group, deadline
        settings = search.settings
        self.instances = [
            Instance(p, settings.copies if p.tokens <= 1024 else max(1, settings.copies // 4), search.device)
            for p in group.problems
        ]
        # What was found for adapters without a shared pair holds for those with one.
        found = [entry.override for entry in search.entries]
        self.start = overridden(found, group.rule, group.asked, group.sizes)
        self.base: list[float] = []
        figures = search.figures
        self.floor = None if figures is None else sum(floor_us(p, figures) for p in group.problems)
        self.costs: dict[Any, float] = {}
        self.useless: set[Any] = set()
        self.wrong = 0

    def run(self) -> Entry | None:
        self.base = [0.0] * len(self.instances)
        self._time([self.start])
        if self.start not in self.costs:
            return None
        best = self.start
        if self.floor is not None and sum(self.base) <= NEAR * self.floor:
            return self._entry()
        for number in range(self.search.settings.rounds):
            candidates = [*(known(self.group.rule, best) if number == 0 else ()), *neighbours(best)]
            near = [sizes for sizes in candidates if self._changes_what_is_sought(sizes)]
            self._time(near)
            worth = WORTH * self.costs[best]
            better = sorted((s for s in near if self.costs.get(s, worth) < worth), key=lambda s: self.costs[s])
            if not better:
                break
            self._time([merge(best, better)])
            best = min(self.costs, key=lambda s: self.costs[s])
            if time.monotonic() > self.deadline:
                break
        return self._entry()

    def _entry(self) -> Entry:
        """The best of the finalists, timed again."""
        finalists = sorted(self.costs, key=lambda s: self.costs[s])[:FINALISTS]
        times = {sizes: self._times(sizes, 4) for sizes in dict.fromkeys([self.start, *finalists])}
        base = times[self.start]
        ratio = {s: sum(t / b for t, b in zip(ts, base, strict=True)) / len(base) for s, ts in times.items()}
        best = min(ratio, key=lambda s: ratio[s])
        if ratio[best] > WORTH:
            best = self.start
        return Entry(
            rule=self.group.rule,
            arguments=self.group.arguments,
            blocks={name: getattr(best, name) for name in self.group.fields},
            problems=[str(problem) for problem in self.group.problems],
            rule_us=sum(base),
            best_us=sum(times[best]),
            ratio=ratio[best],
            tried=len(self.costs),
            wrong=self.wrong,
            floor_us=self.floor,
        )

    def _changes_what_is_sought(self, sizes: Any) -> bool:
        return all(getattr(sizes, n) == getattr(self.start, n) for n in sizes._fields if n not in self.group.fields)

    def _time(self, wanted: Sequence[Any]) -> None:
        """Adds the costs of those that are right: the mean of time over that of the start."""
        new = [s for s in dict.fromkeys(wanted) if s not in self.costs and s not in self.useless]
        self.search.progress(str(self.group), more=len(new) * (1 + len(self.instances)))
        tasks = [Task(problem, self.group.rule, sizes) for sizes in new for problem in self.group.problems]
        done = self.search.compile(tasks, self.deadline)
        for sizes in new:
            self.search.progress(steps=1)
            if all(Task(p, self.group.rule, sizes) in done for p in self.group.problems):
                self._try(sizes)
            else:
                self.useless.add(sizes)

    def _try(self, sizes: Any) -> None:
        if self.costs and time.monotonic() > self.deadline:
            return
        ratios = []
        for index, instance in enumerate(self.instances):
            with using({self.group.rule: sizes}):
                try:
                    right = instance.check().passed
                except Exception:  # it needs more than the device has
                    self.useless.add(sizes)
                    return
            if not right:
                self.wrong += 1
                self.useless.add(sizes)
                return
            microseconds = self.search.record_time(instance, self.group, sizes, self.search.settings.repeats)
            if not self.costs:
                self.base[index] = microseconds
            ratios.append(microseconds / self.base[index])
            if ratios[-1] > HOPELESS:
                self.useless.add(sizes)
                return
        self.costs[sizes] = sum(ratios) / len(ratios)

    def _times(self, sizes: Any, more: int) -> list[float]:
        repeats = more * self.search.settings.repeats
        return [self.search.record_time(instance, self.group, sizes, repeats) for instance in self.instances]


def problems(shapes: Sequence[LayerShape], settings: Settings) -> Iterator[Problem]:
    """Decode first, and the commonest kinds of adapter first: time may run out."""
    adapters = [Adapter(rank=rank) for rank in settings.ranks]
    if settings.shared_rank:
        adapters.append(Adapter(shared=True))
    if settings.rotation_width:
        adapters.append(Adapter(rotation_width=settings.rotation_width))
    for tokens in sorted(settings.tokens):
        for adapter in adapters:
            for shape in shapes:
                width = adapter.rotation_width
                if not width or shape.in_features % width == 0:
                    yield Problem(shape, tokens, adapter, settings.tenants, settings.dtype, settings.shared_rank)


def _is_sought(name: str, arguments: Mapping[str, object]) -> bool:
    """Fields of pairs, and what depends on them, are sought with a pair, all others without."""
    if name in FOLLOW_THE_BATCH:
        return False
    return may_set(name, arguments) if "shared_rank" in arguments else not name.startswith("shared_")


_instances: dict[Problem, Instance] = {}
_MOST_INSTANCES = 8
_COMPILE_TOKENS = 512
"""Rows that choose the same kernels as more rows do."""


def _compile(task: Task) -> str | None:
    """Runs in a process of its own."""
    problem = replace(task.problem, tokens=min(task.problem.tokens, _COMPILE_TOKENS))
    try:
        if problem not in _instances:
            if len(_instances) >= _MOST_INSTANCES:
                _instances.clear()
            _instances[problem] = Instance(problem, 1, torch.device("cuda"))
        with using({} if task.rule is None else {task.rule: task.sizes}):
            _instances[problem].run()
        torch.cuda.synchronize()
    except Exception as error:  # more shared memory or registers than there are; the search goes on without it
        return f"{type(error).__name__}: {str(error)[:120]}"
    return None

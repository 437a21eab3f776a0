"""Gives the GPU to one engine at a time, in an order that rotates over the repetitions, and writes a row for each.

Engines start, load their adapters, are checked and warm up side by side. Only then is anything timed, and an engine
that is not being timed has no request. So what is compared shares the machine, its clocks and its temperature.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import rows

from serving import facts, loads, profiling
from serving.plans import Arm, Block, Cell, Plan
from serving.pools import POOLS
from serving.processes import Failed
from serving.session import Session, Settings


def measure(settings: Settings, plan: Plan, run: str, say: Callable[[str], None]) -> None:
    """Run one plan; every row is in the file as soon as it is known."""
    with Session(settings, plan, say) as session:
        _Rounds(session, run).run()
        if settings.profile:
            profiling.profile(session, run)


class _Rounds:
    """A round is one cell through all its arms, once."""

    def __init__(self, session: Session, run: str) -> None:
        self.session = session
        self.run_name = run
        self.seconds: dict[str, float] = {}
        self.told: set[tuple[str, Arm]] = set()

    def run(self) -> None:
        session = self.session
        for number, block in enumerate(session.plan):
            if number:
                self._warm_up(block)
            for repetition in range(session.settings.repetitions or block.repetitions):
                for cell in block.cells:
                    longest = max(self.seconds.values(), default=0)
                    if time.monotonic() + self.seconds.get(cell.name, longest) > session.deadline:
                        session.say(f"the time is used up before repetition {repetition} of {cell.name}")
                        return
                    self._round(cell, repetition)

    def _warm_up(self, block: Block) -> None:
        ready = self.session.engines
        with ThreadPoolExecutor(len(ready) or 1) as pool:
            tasks = {name: pool.submit(self.session.warm_up, name, engine, block) for name, engine in ready.items()}
        for name, task in tasks.items():
            if isinstance(error := task.exception(), Failed):
                self.session.lose(name, str(error))
            elif error is not None:
                raise error

    def _round(self, cell: Cell, repetition: int) -> None:
        start = time.monotonic()
        turn = repetition % len(cell.arms)
        order = cell.arms[turn:] + cell.arms[:turn]
        told = []
        for position, arm in enumerate(order):
            row = self._row(cell, arm, repetition, position, order)
            if row is not None:
                rows.append(self.session.settings.out, row)
                told.append(_short(row))
        self.seconds[cell.name] = time.monotonic() - start
        self.session.say(f"{cell.name} {repetition}: {', '.join(told)}")

    def _row(
        self, cell: Cell, arm: Arm, repetition: int, position: int, order: tuple[Arm, ...]
    ) -> rows.ServeRow | None:
        """The row of one arm; None where it has said before why there are no times."""
        name, variant = arm
        correctness = self.session.correctness(name, cell.pool, variant)
        known = correctness if isinstance(correctness, rows.Correctness) else None
        times, problem = None, None
        if known is None:
            problem = str(correctness)
        elif not known.passed:
            problem = (
                f"error / effect {known.worst:.3g}, base rows {known.base_error:.3g} nats: not right, so not timed"
            )
        else:
            try:
                times = self._stream(cell, name, variant, repetition)
            except Failed as error:
                problem = str(error)
                self.session.lose(name, problem)
        if times is None:
            if (cell.name, arm) in self.told:
                return None
            self.told.add((cell.name, arm))
        return rows.ServeRow(
            **facts.described(self.session, self.run_name, cell, arm),
            times=times,
            problem=problem,
            correctness=known,
            repetition=repetition,
            position=position,
            order=["/".join(other) for other in order],
        )

    def _stream(self, cell: Cell, name: str, variant: str, repetition: int) -> rows.Times:
        session, pool = self.session, POOLS[cell.pool]
        child, standing = session.engines[name].child, pool.tenants[variant]
        child.ask(session.deadline, "stream", loads.touch(cell.load, pool.size, session.vocabulary), standing)
        drawn = loads.draw(cell.load, session.requests(cell), pool.size, session.vocabulary, repetition)
        timings, seconds = child.ask(session.deadline + 60, "stream", drawn, standing)
        return rows.Times(
            first_token=rows.Spread.of([timing.first for timing in timings]),
            token=rows.Spread.of([timing.token for timing in timings]),
            lateness=rows.Spread.of([timing.late for timing in timings]),
            seconds=seconds,
        )


def _short(row: rows.ServeRow) -> str:
    if row.times is None:
        return f"{row.arm} {row.problem}"
    value = row.times.token.median if row.stream.kind == "decode" else row.times.first_token.mean
    return f"{row.arm} {value:.2f} ms"

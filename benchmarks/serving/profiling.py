"""After the timed rounds: one more stream of every arm, under vLLM's profiler, to see where the device's time goes."""

import time
from dataclasses import replace

import rows

from serving import facts, loads
from serving.engines import SEQUENCES
from serving.plans import Arm, Cell
from serving.pools import POOLS
from serving.processes import Failed
from serving.profiles import ProfileRow
from serving.session import Session

OUTPUT_TOKENS = {"decode": 16, "prefill": 1}
"""Of a request, so that a trace stays small and a profile of prefill has nothing else in it."""


def profile(session: Session, run: str) -> None:
    """A row for every arm of the first block that is right, until the time is used up."""
    longest = 0.0
    arms = [(cell, arm) for block in session.plan[:1] for cell in block.cells for arm in cell.arms]
    for cell, arm in arms:
        start = time.monotonic()
        if start + longest > session.deadline:
            session.say(f"the time is used up before the profile of {'/'.join(arm)}, {cell.name}")
            return
        correctness = session.correctness(arm[0], cell.pool, arm[1])
        if not isinstance(correctness, rows.Correctness) or not correctness.passed:
            continue
        try:
            row = _row(session, run, cell, arm, correctness)
        except Failed as error:
            session.lose(arm[0], f"profile of {cell.name}: {error}")
            continue
        rows.append(session.settings.out, row)
        longest = max(longest, time.monotonic() - start)
        spent = row.device_time
        session.say(f"profile of {row.arm}, {cell.name}: busy {spent.busy:.1f} ms of {spent.span:.1f} ms")


def _row(session: Session, run: str, cell: Cell, arm: Arm, correctness: rows.Correctness) -> ProfileRow:
    pool = POOLS[cell.pool]
    child, standing = session.engines[arm[0]].child, pool.tenants[arm[1]]
    count, output_tokens = min(SEQUENCES, session.requests(cell)), OUTPUT_TOKENS[cell.load.kind]
    drawn = loads.draw(cell.load, count, pool.size, session.vocabulary, 0)
    child.ask(session.deadline, "stream", loads.touch(cell.load, pool.size, session.vocabulary), standing)
    profiled = [replace(request, output_tokens=output_tokens) for request in drawn]
    device_time = child.ask(session.deadline + 60, "profile", profiled, standing)
    known = facts.described(session, run, cell, arm)
    stream = known.pop("stream").model_copy(update={"requests": count, "output_tokens": output_tokens})
    return ProfileRow(**known, stream=stream, correctness=correctness, device_time=device_time)

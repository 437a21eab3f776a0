"""The driver's rounds, with engines that only pretend."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import rows
from serving import driver
from serving.client import Timing
from serving.loads import Load
from serving.plans import Block, Cell
from serving.processes import Failed
from serving.session import Session
from test_rows import RIGHT

ARMS = (("base", "base"), ("stock", "lora"), ("scute", "own"))
WRONG = RIGHT.model_copy(update={"base_error": 1.0})


class Pretended:
    """An engine process: notes what it is asked for in a list that all share."""

    def __init__(self, name: str, asked: list[tuple[str, int]], fails: bool = False) -> None:
        self.name, self.asked, self.fails = name, asked, fails

    def ask(self, _deadline, _what, requests, tenants):
        self.asked.append((self.name, len(requests)))
        if self.fails:
            raise Failed("it ended")
        assert max(request.tenant for request in requests) < len(tenants)
        return [Timing(0.0, 0.01, 0.005)] * len(requests), 1.0


class PretendedSession:
    def __init__(self, out: Path, correctness=None, fails=(), seconds=60.0, repetitions=None) -> None:
        self.asked: list[tuple[str, int]] = []
        cell = Cell("five-methods", Load("decode"), ARMS, 40)
        self.plan = [Block((cell,), 3)]
        self.settings = SimpleNamespace(out=out, model="tiny", layers=2, dtype="float32", repetitions=repetitions)
        self.environment = rows.Environment.here()
        self.vocabulary, self.folders, self.problems = 256, {}, {}
        self.deadline = time.monotonic() + seconds
        self.engines = {
            name: SimpleNamespace(
                child=Pretended(name, self.asked, name in fails), record=rows.Engine(name=name, scute=name == "scute")
            )
            for name, _ in ARMS
        }
        self._correctness = correctness or {}
        self.said: list[str] = []

    def say(self, text):
        self.said.append(text)

    lose = Session.lose

    def requests(self, cell):
        return cell.requests

    def correctness(self, name, *_):
        if name not in self.engines:
            return self.problems[name]
        tenants = {f"t.{n}": rows.Deviation(effect=1.0, error=0.0) for n in range(20)}
        return self._correctness.get(name, RIGHT.model_copy(update={"tenants": tenants}))


@pytest.fixture
def out(tmp_path):
    return tmp_path / "rows.jsonl"


def run(session: PretendedSession) -> list[rows.ServeRow]:
    driver._Rounds(session, "1").run()
    return rows.read([session.settings.out]) if session.settings.out.exists() else []


def test_arms_take_turns_in_an_order_that_rotates(out):
    session = PretendedSession(out)
    written = run(session)
    rounds = [["base", "stock", "scute"], ["stock", "scute", "base"], ["scute", "base", "stock"]]
    assert [row.engine.name for row in written] == [name for names in rounds for name in names]
    assert [row.position for row in written] == [0, 1, 2] * 3
    assert all(row.times.token.median == pytest.approx(5) for row in written)
    # Every stream follows a request to each tenant, so that what was evicted is back.
    assert session.asked == [(row.engine.name, count) for row in written for count in (20, 40)]


def test_what_is_not_right_is_not_timed(out):
    session = PretendedSession(out, correctness={"stock": WRONG, "scute": "a log-probability is not finite"})
    written = run(session)
    assert {name for name, _ in session.asked} == {"base"}
    problems = {row.engine.name: row.problem for row in written if row.times is None}
    assert "not timed" in problems["stock"]
    assert problems["scute"] == "a log-probability is not finite"
    assert sum(row.engine.name == "stock" for row in written) == 1, "said once"


def test_an_engine_that_fails_is_asked_for_nothing_more(out):
    session = PretendedSession(out, fails={"stock"})
    written = run(session)
    assert sum(name == "stock" for name, _ in session.asked) == 1
    assert [row.engine.name for row in written if row.times].count("scute") == 3
    assert next(row.problem for row in written if row.engine.name == "stock") == "it ended"


def test_no_round_starts_after_the_time(out):
    session = PretendedSession(out, seconds=-1.0)
    assert run(session) == []
    assert "used up" in session.said[-1]

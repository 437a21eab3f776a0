"""Profiles are rows of their own: taken after the rounds, of what is right, and read by nobody else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import rows
from pydantic import ValidationError
from serving import bounds, profiles, profiling
from serving.processes import Failed
from serving.traces import DeviceTime, Family
from test_driver import WRONG, Pretended, PretendedSession
from test_rows import row, wrong

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serve.py"
SPENT = DeviceTime(
    source="device",
    span=10,
    busy=7,
    idle=3,
    events=30,
    gaps=4,
    gap_ms=2.5,
    families=[Family(name="GEMM", launches=20, ms=6), Family(name="other", launches=10, ms=1)],
)


def profile(**changes) -> profiles.ProfileRow:
    given = row(**changes).model_dump(include=set(rows.Served.model_fields) - {"benchmark"})
    return profiles.ProfileRow(**given, device_time=SPENT)


def test_no_profile_without_proof():
    with pytest.raises(ValidationError, match="profile"):
        profile(correctness=wrong(base_error=1.0), times=None, problem="not right")


def test_profiles_and_times_share_a_file(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows.append(file, row())
    rows.append(file, profile())
    assert profiles.read([file]) == [profile()]
    assert rows.read([file]) == [row()]
    assert bounds.kernel_rows([file]) == []


def test_the_table_has_the_newest_run_of_a_cell():
    own = row().tenants
    shown = profiles.table([profile(run="0"), profile(run="1"), profile(run="1", tenants=own)])
    title, span, busy, idle, gaps, gemm, other = shown.splitlines()
    assert (
        title.split()
        == ["five-methods", "decode:burst,", "16", "requests,", "8", "+", "128", "tokens"] + ["scute/own"] * 2
    )
    assert [line.split()[-2:] for line in (span, gaps)] == [["10.00", "(30)"], ["2.50", "(4)"]]
    assert (busy.split()[-1], idle.split()[-1]) == ("7.00", "3.00")
    assert gemm.split() == ["GEMM", *["6.00", "(20)"] * 2]
    assert other.startswith("other")


class Profiled(Pretended):
    def ask(self, deadline, what, requests, tenants):
        if what != "profile":
            return super().ask(deadline, what, requests, tenants)
        if self.name == "stock":
            raise Failed("it ended")
        assert {request.output_tokens for request in requests} == {profiling.OUTPUT_TOKENS["decode"]}
        return SPENT


def taken(out: Path, **changes) -> tuple[PretendedSession, list[profiles.ProfileRow]]:
    session = PretendedSession(out, **changes)
    for name, engine in session.engines.items():
        engine.child = Profiled(name, session.asked)
    profiling.profile(session, "1")
    return session, profiles.read([out]) if out.exists() else []


def test_every_arm_that_is_right_is_profiled_once(tmp_path):
    session, written = taken(tmp_path / "rows.jsonl", correctness={"base": WRONG})
    assert [(one.arm, one.device_time) for one in written] == [("scute/own", SPENT)]
    assert (written[0].stream.requests, written[0].stream.output_tokens) == (40, 16)
    assert session.asked == [("stock", 20), ("scute", 20)], "every tenant is touched first"
    assert "it ended" in session.problems["stock"]


def test_no_profile_after_the_time(tmp_path):
    session, written = taken(tmp_path / "rows.jsonl", seconds=-1.0)
    assert written == []
    assert "used up" in session.said[-1]


@pytest.mark.engine
def test_an_engine_of_the_cpu_is_profiled(tmp_path):
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, str(SCRIPT), "run", "--plan", "rehearsal", "--model", "tiny", "--cells", "prefill"]
    command += ["--engines", "base", "--requests", "20", "--profile", "--out", str(out), "--work", str(tmp_path)]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (timed,), (profiled,) = rows.read([out]), profiles.read([out])
    assert timed.times is not None, done.stdout
    assert (profiled.arm, profiled.device_time.source) == ("base/base", "cpu")
    assert "torch_profiler_dir" not in profiled.engine.arguments["profiler_config"]
    assert {"GEMM", "attention"} <= {family.name for family in profiled.device_time.families}

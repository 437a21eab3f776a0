"""What the kernel benchmark times, what it counts, and that it refuses a time for a wrong result."""

from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from rows import Environment
from steps import cases
from steps.arms import ScuteArm, Workload, draw_weights
from steps.cases import CASES, SMALL, Case, least_bytes, sampled_rows, slot_of_row
from steps.measure import Measurement
from steps.record import Correctness, Performance, RouteRow, Row, Time, append, read

from scute.kernels.routes import Field
from scute.tuning.layers import Adapter, LayerShape, Pool
from scute.tuning.timing import Clock

ONE = LayerShape("o", 8, (6,))
TWO = LayerShape("qkv", 8, (6, 4))


def arm(case: Case, tokens: int = 24, dtype: torch.dtype = torch.float32, copies: int = 2) -> ScuteArm:
    adapters = case.adapters[:5]
    workload = Workload(SMALL, draw_weights(SMALL, copies, dtype, "cpu"), copies, slot_of_row(tokens, len(adapters)))
    return ScuteArm(workload, Pool(adapters, SMALL, copies, dtype, "cpu", shared_rank=8))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tokens", [24, 300])
def test_every_case_is_right(name, tokens):
    verdict = arm(CASES[name], tokens).check()
    assert verdict.passed
    assert 0 < verdict.worst < 2e-5


@pytest.mark.parametrize("field", [Field.RANK, Field.A, Field.B, Field.SCALE])
def test_a_wrong_table_is_seen(field):
    wrong = arm(CASES["dora-16"])
    wrong.pool.table[1, 1, field] -= 1
    assert not wrong.check().passed


def test_memory_nobody_owns_is_seen():
    wrong = arm(CASES["lora-16"])
    wrong.pool.table[0, 0, Field.A] = 0  # the first unit of the arena is poisoned
    verdict = wrong.check()
    assert not verdict.finite
    assert not verdict.passed


def test_a_wrong_result_has_no_time():
    clock = Clock("cpu")
    right, wrong = arm(CASES["lora-16"]), arm(CASES["lora-16"])
    wrong.pool.table[2, 0, Field.RANK] = 3
    base = clock.record(right.workload.step)
    correctness, performance = Measurement(clock, 1, 4.0).run(right, 1000, base)
    assert correctness.passed
    assert performance is not None
    assert performance.bytes == 4000
    assert performance.adapters == pytest.approx(performance.step.median - performance.base.median)
    correctness, performance = Measurement(clock, 1, 1.0).run(wrong, 1000, base)
    assert not correctness.passed
    assert performance is None


def row(correctness: Correctness | None, performance: Performance | None) -> Row:
    return Row(
        case="lora-16",
        engine="scute",
        tokens=64,
        layers=32,
        tenants=20,
        dtype="float16",
        dry=True,
        environment=Environment.here(),
        correctness=correctness,
        performance=performance,
    )


PASSED = Correctness(worst_error=1e-4, bound=2e-3, rows=4, finite=True, graph_error=0.0, passed=True)
TIMED = Performance(layers_timed=1, alone=Time(median=1, low=1, high=1), bytes=1, bytes_ms=1.0, kernels={"expand": 0.5})


def test_a_row_with_a_time_needs_proof(tmp_path):
    for correctness in (None, PASSED.model_copy(update={"passed": False})):
        with pytest.raises(ValidationError, match="not shown to be right"):
            row(correctness, TIMED)
    append(tmp_path / "rows.jsonl", row(PASSED, TIMED))
    append(tmp_path / "rows.jsonl", row(None, None))

    assert [r.performance is None for r in read(tmp_path / "rows.jsonl")] == [False, True]
    with pytest.raises(ValidationError):
        RouteRow.model_validate({"correctness": PASSED.model_copy(update={"passed": False})})


def test_tenants_take_turns():
    decode, prefill = slot_of_row(cases.DECODE_TOKENS), slot_of_row(cases.PREFILL_TOKENS)
    assert decode[:21] == [*range(20), 0]
    assert prefill[255:257] == [0, 1]
    assert len(prefill) == 8192
    for slots in (decode, prefill):
        rows = sampled_rows(slots)
        assert {slots[row] for row in rows} == set(range(20))
        assert rows[-1] == len(slots) - 1


@pytest.mark.parametrize(
    ("shape", "adapters", "slots", "expected"),
    [
        # a and b; x once; y read and written
        (ONE, [Adapter(rank=3)], [0, 0], 2 * (3 * 8 + 3 * 6) + 2 * 2 * 8 + 2 * 2 * 2 * 6),
        # two slices have two a, and x is read once
        (TWO, [Adapter(rank=3)], [0], 2 * (2 * 3 * 8 + 3 * 10) + 2 * 8 + 2 * 2 * 10),
        # an adapter without rows counts for nothing; a scale needs no x
        (ONE, [Adapter(rank=3), Adapter(scale=True)], [1, 1, 1], 4 * 6 + 2 * 2 * 3 * 6),
        # one slice of two
        (TWO, [Adapter(scale=True, only={"qkv": (1,)})], [0], 4 * 4 + 2 * 2 * 4),
        # the pair once for both adapters, its B as wide as the widest slice; d for every slice
        (
            TWO,
            [Adapter(shared=True)] * 2,
            [0, 1],
            2 * 4 * (10 + 2 * 256) + 2 * (2 * 2 * 10) + 2 * 2 * 8 + 2 * 256 * (8 + 6),
        ),
        # blocks and rotated rows for every slice, x once, y not at all
        (TWO, [Adapter(rotation_width=4)], [0, 0, 0], 2 * 2 * 8 * (4 + 3) + 2 * 3 * 8),
    ],
)
def test_least_bytes(shape, adapters, slots, expected):
    assert least_bytes(Case("", tuple(adapters), 0), [shape], 1, slots, 2) == expected
    assert least_bytes(Case("", tuple(adapters), 0), [shape], 3, slots, 2) == 3 * expected


def test_bytes_of_the_paper():
    """Table 2: 16 tenants of rank 16 read 1.34 GB of factors a step."""
    case = replace(CASES["lora-16"], adapters=CASES["lora-16"].adapters[:16])
    total = least_bytes(case, cases.LLAMA_8B, cases.LAYERS, slot_of_row(16, 16), 2)
    rows = 16 * 2 * sum(s.in_features + 2 * s.out_features for s in cases.LLAMA_8B) * cases.LAYERS
    assert (total - rows) / 1e9 == pytest.approx(1.34, abs=0.005)

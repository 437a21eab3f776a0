"""A row has times only if what was timed was shown to be right, and ratios are taken within a run."""

import json

import numpy as np
import pytest
import rows
from pydantic import ValidationError
from serving import checks, summary

RIGHT = rows.Correctness(
    tenants={f"lora.{n}": rows.Deviation(effect=1.0, error=0.002) for n in range(2)},
    base_error=0.002,
    tokens=76,
    limit=0.02,
    base_limit=0.02,
)
SPREAD = rows.Spread.of([0.004, 0.005, 0.009])
TIMES = rows.Times(first_token=SPREAD, token=SPREAD, lateness=SPREAD, seconds=1.0)


def row(ms: float = 5.0, **changes) -> rows.ServeRow:
    spread = rows.Spread.of([ms / 1000])
    given = {
        "run": "1",
        "environment": rows.Environment.here(),
        "model": "llama-8b",
        "layers": None,
        "dtype": "float16",
        "engine": rows.Engine(name="scute", scute=True),
        "tenants": rows.Tenants(pool="five-methods", variant="own", count=2, kinds={}, ranks={}, targets={}),
        "stream": rows.Stream(
            kind="decode", rate=None, popularity="turns", requests=16, prompt_tokens=8, output_tokens=128
        ),
        "repetition": 0,
        "position": 0,
        "order": [],
        "correctness": RIGHT,
        "times": rows.Times(first_token=spread, token=spread, lateness=spread, seconds=1.0),
    }
    return rows.ServeRow(**given | changes)


def wrong(**changes) -> rows.Correctness:
    return RIGHT.model_copy(update=changes)


@pytest.mark.parametrize(
    "correctness",
    [
        None,
        wrong(base_error=0.03),
        wrong(tenants=RIGHT.tenants | {"lora.0": rows.Deviation(effect=1.0, error=0.03)}),
        wrong(tenants=RIGHT.tenants | {"lora.0": rows.Deviation(effect=0.0, error=0.0)}),
        wrong(tenants={}),
    ],
)
def test_no_time_without_proof(correctness):
    with pytest.raises(ValidationError, match="times"):
        row(correctness=correctness)
    assert row(correctness=correctness, times=None, problem="not right").times is None


def test_a_row_without_times_says_why():
    with pytest.raises(ValidationError, match="problem"):
        row(times=None)


def test_rows_come_back_from_a_file(tmp_path):
    file = tmp_path / "rows.jsonl"
    written = [row(), row(times=None, problem="lost")]
    for one in written:
        rows.append(file, one)
    with file.open("a") as out:
        out.write(json.dumps({"benchmark": "kernels"}) + "\n")
    assert rows.read([file]) == written


def of(arm: str, ms: float, repetition: int, run: str = "1") -> rows.ServeRow:
    engine, _, variant = arm.partition("/")
    return row(
        ms,
        run=run,
        repetition=repetition,
        engine=rows.Engine(name=engine, scute=engine == "scute"),
        tenants=rows.Tenants(pool="five-methods", variant=variant, count=2, kinds={}, ranks={}, targets={}),
    )


COMPARED = summary.Comparison("five-methods", "scute/own", "stock/lora", "")


def test_ratios_are_paired_by_repetition_within_the_newest_run():
    pairs = [(8.0, 10.0), (9.0, 10.0), (14.0, 20.0)]
    measured = [of(arm, ms, r) for r, both in enumerate(pairs) for arm, ms in zip(COMPARED[1:3], both, strict=True)]
    measured.append(of("scute/own", 1.0, 3))
    ratio = summary.ratio(measured, COMPARED, "decode:burst")
    assert ratio.median == pytest.approx(0.8)
    assert (ratio.low, ratio.high) == (pytest.approx(0.7), pytest.approx(0.9))
    assert ratio.repetitions == 3
    measured += [of("scute/own", 3.0, 0, "2"), of("stock/lora", 4.0, 0, "2"), of("stock/lora", 4.0, 0, "3")]
    assert summary.ratio(measured, COMPARED, "decode:burst").median == pytest.approx(0.75)
    assert summary.ratio(measured, COMPARED, "prefill:burst") is None


def test_the_table_says_what_was_compared():
    text = summary.table([of("scute/own", 8, 0), of("stock/lora", 10, 0)])
    assert "| Five methods, 20 tenants / plain LoRA in vLLM as shipped | 0.80 [0.80, 0.80] | – |" in text


def test_the_table_goes_between_the_markers(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{summary.START}\nold\n{summary.END}\nafter\n")
    summary.write(page, "new")
    assert summary.between_markers(page.read_text()) == "new"
    assert page.read_text().startswith("before\n")
    assert page.read_text().endswith("\nafter\n")


def test_what_is_compared_is_the_paper_s():
    spread = rows.Spread.of([0.001, 0.002, 0.009])
    times = TIMES.model_copy(update={"token": spread, "first_token": spread})
    assert summary.value(row(times=times)) == pytest.approx(2)
    prefill = row().stream.model_copy(update={"kind": "prefill"})
    assert summary.value(row(times=times, stream=prefill)) == pytest.approx(4)


def test_correctness_compares_as_many_tokens_as_were_scored():
    batch = checks.mixed_batch(["lora.0"], 256)
    reference = {"base": np.zeros((2, 19)), "lora.0": np.ones((2, 19))}
    served = [[1.25 if name else 0.5] * 8 for name, *_ in batch]
    found = checks.correctness(batch, served, reference, "base")
    assert found.tenants == {"lora.0": rows.Deviation(effect=1.0, error=0.25)}
    assert (found.base_error, found.tokens, found.passed) == (0.5, 32, False)
    with pytest.raises(ValueError, match="not finite"):
        checks.correctness(batch, [[float("nan")] * 8] * len(batch), reference, "base")

"""Verdicts on bounds, and that what nobody measured is not given one."""

import json
from pathlib import Path

import pytest
from serving import bounds
from serving.bounds import Bound
from serving.summary import Ratio


@pytest.mark.parametrize(
    ("ratio", "at_most", "at_least"),
    [
        (Ratio(0.80, 0.70, 0.85, 3), "met", "not met"),
        (Ratio(0.80, 0.70, 0.90, 3), "open", "not met"),
        (Ratio(0.8501, 0.70, 0.90, 3), "not met", "open"),
        (Ratio(0.90, 0.86, 0.95, 3), "not met", "met"),
    ],
)
def test_a_bound_is_met_by_the_whole_interval(ratio, at_most, at_least):
    assert Bound("", 0.85, "").verdict(ratio) == at_most
    assert Bound("", 0.85, "", at_least=True).verdict(ratio) == at_least


def test_without_rows_nothing_is_met_but_what_is_computed():
    lines = [line for line in bounds.page([]).splitlines() if line.endswith(" met |")]
    assert [line.split(" | ")[0] for line in lines] == ["| GPU memory reserved / bytes owned"]


def kernel_line(case: str, adapters: float, **changes: object) -> str:
    environment = dict.fromkeys(("driver", "vllm", "torch", "triton", "transformers", "peft"))
    environment |= {"device": "GPU", "cores": 1, "python": "3", "commit": "0", "date": "0"}
    right = {"worst_error": 0, "bound": 1, "rows": 1, "finite": True, "graph_error": 0, "passed": True}
    time = dict.fromkeys(("median", "low", "high"), 1.0)
    timed = {
        "layers_timed": 1,
        "adapters": adapters,
        "alone": time,
        "bytes": 1,
        "bytes_ms": 1,
        "bound": 1,
        "kernels": {},
    }
    row = {"benchmark": "kernels", "case": case, "engine": "scute", "tokens": 64, "layers": 1, "tenants": 1}
    row |= {"dtype": "float16", "dry": False, "environment": environment, "correctness": right, "performance": timed}
    return json.dumps(row | changes, separators=(",", ":")) + "\n"


@pytest.mark.parametrize(
    ("second", "end"),
    [
        (kernel_line(bounds.POOL, 3.0), "1.50 (lora-16), 3.00 (five-methods) | not met |"),
        (kernel_line(bounds.POOL, 1.9), "1.50 (lora-16), 1.90 (five-methods) | met |"),
        (kernel_line(bounds.POOL, 1.9, dry=True), "not measured yet |  |"),
        (kernel_line(bounds.POOL, 1.9, tokens=8192), "not measured yet |  |"),
    ],
)
def test_adapter_work_needs_both_pools(tmp_path: Path, second, end):
    file = tmp_path / "kernels.jsonl"
    file.write_text(kernel_line("lora-16", 1.5) + second)
    (line,) = (line for line in bounds.page([file]).splitlines() if line.startswith(f"| {bounds.BYTES.words} |"))
    assert line.endswith(end)

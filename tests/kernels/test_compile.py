"""The interpreter accepts more than the compiler does, so the kernels are also compiled, for an absent GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    if torch.cuda.is_available():
        pytest.skip("the other tests compile the kernels for this GPU")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    program = [sys.executable, str(Path(__file__).with_name("compile_kernels.py"))]
    result = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_every_kernel_compiles(reports):
    assert len(reports) == 41


def test_shared_memory_fits_every_gpu_since_ampere(reports):
    for report in reports:
        on_hopper = any(name in report["name"] for name in ("gemm", "kept"))
        assert report["shared_memory"] <= (227 if on_hopper else 99) * 1024


def test_loads_and_stores_of_y_are_wide_at_usual_sizes(reports):
    usual = [report for report in reports if report["name"].endswith("aligned")]
    assert all(report["wide_loads"] for report in usual)
    assert all(report["wide_stores"] for report in usual if "tiles" in report["name"] and "expand" in report["name"])

"""The kernel benchmarks end to end on the CPU, vLLM's kernels in Triton's interpreter included."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(script: str, *arguments: object) -> str:
    command = [sys.executable, ROOT / "benchmarks" / script, "--dry", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_kernels(tmp_path):
    out = tmp_path / "kernels.jsonl"
    few = ("--layers", 1, "--repeats", 1, "--tokens", 64)
    text = run("kernels.py", "--out", out, *few, "--cases", "five-methods,oft", "--stock-cases", "lora-16")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["benchmark"] for row in rows] == ["constants", *["kernels"] * 3]
    assert [row["engine"] for row in rows[1:]] == ["scute", "scute", "stock"]
    assert all(row["correctness"]["passed"] and row["performance"] and row["dry"] for row in rows[1:])
    assert "five-methods" in text


def test_a_step_for_a_profiler_times_nothing(tmp_path):
    out = tmp_path / "kernels.jsonl"
    run("kernels.py", "--out", out, "--once", "--layers", 1, "--tokens", 64, "--cases", "oft", "--engines", "scute")
    assert [json.loads(line)["benchmark"] for line in out.read_text().splitlines()] == ["constants"]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    text = run("stock_tuning.py", "--folder", folder, "--tokens", 64, "--ranks", 16)
    assert "shrink slices 3" in text
    return folder


@pytest.mark.parametrize(("op", "k", "n"), [("shrink", 64, 16), ("expand", 16, 64)])
def test_vllm_finds_what_the_search_wrote(tuned, monkeypatch, op, k, n):
    from vllm.lora.ops.triton_ops import utils

    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(tuned))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "cpu")
    utils.load_lora_op_config.cache_clear()
    utils.get_lora_op_configs.cache_clear()
    adds = {"add_inputs": True} if op == "expand" else {}
    hidden, rank = (k, n) if op == "shrink" else (n, k)
    try:
        found = utils.get_lora_op_configs(op, 21, 64, hidden, rank, 3, **adds)
    finally:
        utils.load_lora_op_config.cache_clear()
        utils.get_lora_op_configs.cache_clear()
    name = {"shrink": "cpu_SHRINK.json", "expand": "cpu_EXPAND_TRUE.json"}[op]
    assert found == json.loads((tuned / name).read_text())["21"]["3"]["64"][str(k)][str(n)]
    assert {"block_m", "block_n", "block_k", "num_warps", "num_stages", "num_ctas"} <= set(found)

"""The whole of the `serve` benchmark on the CPU: two engines of a tiny model, checked, timed and written down."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import rows
from serving import summary

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serve.py"


@pytest.mark.engine
def test_two_engines_side_by_side(tmp_path):
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, str(SCRIPT), "run", "--plan", "rehearsal", "--model", "tiny", "--cells", "decode"]
    command += ["--engines", "base", "scute", "--requests", "20", "--out", str(out), "--work", str(tmp_path)]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    written = rows.read([out])
    assert {row.arm for row in written} == {"base/base", "scute/lora", "scute/own", "scute/base"}, done.stdout
    for row in written:
        assert row.problem is None
        assert row.correctness.worst < 1e-3
        assert row.times.token.median > 0
        assert row.engine.kv_cache_tokens > 0
    (mixed,) = (row for row in written if row.arm == "scute/own")
    assert mixed.tenants.kinds == dict.fromkeys(("lora", "dora", "ia3", "vera", "oft"), 4)
    assert mixed.tenants.targets["ia3"] == ["down_proj", "k_proj", "v_proj"]
    assert "Base rows alone / base model without LoRA" in summary.table(written)

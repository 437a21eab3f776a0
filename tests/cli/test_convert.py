"""`scute convert`: what it prints, in both forms, and its exit codes."""

import json

import pytest
from command import scute

from scute.cli import convert as command
from scute.testing.adapters import write_adapter
from scute.testing.oracle import load_base
from scute.testing.tiny import tiny_prompts, tiny_qwen2

NAMES = ("ia3",)


@pytest.fixture
def adapter(folders):
    return folders["ia3"]


@pytest.fixture
def convert(base, adapter, tmp_path):
    return lambda *more: scute("convert", adapter, tmp_path / "out", "--base", base, "--rank", 8, *more)


def test_json_tells_every_layer_and_the_whole(convert, tmp_path):
    result = convert("--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["converted"], told["source"], told["measured_on"]) == (True, "(IA)3", "random tokens")
    assert len(told["layers"]) == 6
    assert all(layer["route"] == "svd" and layer["rank"] == 8 for layer in told["layers"])
    shares = [layer["left_out"] for layer in told["layers"]]
    assert min(shares) <= told["left_out"] <= max(shares)
    assert told["measured"]["ratio"] == pytest.approx(told["measured"]["error"] / told["measured"]["effect"])
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_text_tells_the_same(convert, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"tokens": prompt}) for prompt in tiny_prompts()))
    result = convert("--method", "asvd", "--data", data)
    assert result.exit_code == 0, result.output
    for part in ("model.layers.0.mlp.up_proj", "left out of the squared norm", "error / effect", "fitted on"):
        assert part in result.stdout


def test_text_is_short(convert, base, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "SHOWN", 2)
    told = convert("--no-measure").stdout
    assert told.count("svd") == 2
    assert "exact on 0 of 6 projections; the table has the worst 2 of the others" in told
    adapter = write_adapter(load_base(base), "lora-r3", tmp_path / "lora-r3")
    whole = scute("convert", adapter, tmp_path / "lora", "--base", base, "--rank", 8, "--no-measure").stdout
    assert "exact on 6 of 6 projections\n" in whole
    assert "worst first" not in whole


def test_without_a_measure_there_is_none(convert):
    assert json.loads(convert("--no-measure", "--json").stdout)["measured"] is None


def test_a_refusal_exits_with_1(adapter, tmp_path):
    qwen = tiny_qwen2(tmp_path / "qwen")
    result = scute("convert", adapter, tmp_path / "out", "--base", qwen, "--rank", 8, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout).items() >= {"converted": False, "code": "conversion.bias"}.items()
    assert not (tmp_path / "out").exists()


def test_wrong_usage_exits_with_2(convert, tmp_path):
    assert convert("--method", "distill").exit_code == 2
    assert convert("--rank", 0).exit_code == 2
    for device in ("tpu", "meta", "cuda:x", ""):
        assert convert("--device", device).exit_code == 2
    assert convert("--seed", 10**30).exit_code == 2
    assert "--data" in convert("--method", "asvd").output
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("")
    assert convert().exit_code == 2
    assert convert("--force").exit_code == 2

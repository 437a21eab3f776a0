"""`scute verify`: one engine against the PEFT library, and the exit codes."""

import json

import pytest
from command import scute

from scute.cli import verify as command

NAMES = ("dora", "vera", "oft")


@pytest.fixture
def folder(folders):
    return folders["dora"]


@pytest.mark.engine
def test_an_engine_that_holds_and_a_bound_that_does_not(base, pool, folder, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    result = scute("verify", pool, "--base", base, "--dtype", "float32", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert [adapter["method"] for adapter in told["adapters"]] == ["DoRA", "OFT", "VeRA"]
    assert all(adapter["ratio"] < 1e-4 and adapter["modules"] == [] for adapter in told["adapters"])
    assert all(0 < adapter["base_ratio"] < 1e-4 for adapter in told["adapters"])
    assert told["versions"]["dtype"] == "float32"
    strict = scute("verify", folder, "--base", base, "--dtype", "bfloat16", "--bound", 0)
    assert strict.exit_code == 1
    for part in ("above", "model.layers.0.self_attn.q_proj", "torch", "base rows", "--dtype float32"):
        assert part in strict.stdout


def test_a_refused_folder_exits_with_1(base, tmp_path):
    result = scute("verify", tmp_path, "--base", base)
    assert result.exit_code == 1
    assert result.stdout.startswith(f"refused: folder.incomplete\n{tmp_path.name}: ")


def test_a_base_model_that_cannot_be_loaded_exits_with_2(base, folder, tmp_path):
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    result = scute("verify", folder, "--base", tmp_path)
    assert result.exit_code == 2
    assert "cannot load the model" in " ".join(result.stderr.replace("│", " ").split())


def test_answers_that_are_not_finite_exit_with_1(base, folder, monkeypatch):
    def run_apart(batch):
        tokens = [batch["prompts"][index] for _, index in batch["rows"]]
        return [[{"tokens": each, "logprobs": [float("nan")] * (len(each) - 1)} for each in tokens]]

    monkeypatch.setattr("scute.verify.verify.run_apart", run_apart)
    result = scute("verify", folder, "--base", base)
    assert result.exit_code == 1
    assert "not finite" in result.stderr


def test_wrong_usage_exits_with_2(base, folder, tmp_path, monkeypatch):
    assert scute("verify", "--base", base).exit_code == 2
    for wrong in ("nonsense", "[1]", '{"max_modle_len": 64}', '{"model": "other"}'):
        assert scute("verify", folder, "--base", base, "--engine", wrong).exit_code == 2, wrong
    assert "max_model_len" in scute("verify", folder, "--base", base, "--engine", '{"max_modle_len": 1}').stderr
    assert scute("verify", folder, "--base", base, "--dtype", "int8").exit_code == 2
    compiled = tmp_path / "compiled"
    assert scute("compile", folder, compiled, "--base", base).exit_code == 0
    assert "compiled folder" in scute("verify", compiled, "--base", base).stderr
    monkeypatch.setattr(command, "find_spec", lambda _: None)
    without_peft = scute("verify", folder, "--base", base)
    assert without_peft.exit_code == 2
    assert "pip install peft" in without_peft.stderr

"""`scute predict`: what it prints in both forms, its exit codes, and that the library says the same."""

import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from peft import LoraConfig
from transformers import DeepseekV3Config, GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

from scute.cli.main import app
from scute.costs import find_device, predict, read_base, read_tenant
from scute.costs.base import _kv_elements
from scute.testing.adapters import Recipe, write_adapter

NAMES = ("dora", "ia3", "lora-r8", "oft", "vera")
GPU = ("--gpu", "h200", "--batch", "8")


def scute(*arguments: object):
    return CliRunner().invoke(app, ["predict", *(str(a) for a in arguments)])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_json_says_what_the_library_says(base, pool):
    result = scute("--base", base, "--pool", pool, *GPU, "--prefill-tokens", 512, "--rank", 16, "--rank", 64, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    sizes, model = read_base(base)
    tenants = [read_tenant(pool / name, sizes, model) for name in NAMES]
    found = predict(sizes, tenants, find_device("h200"), rows=8, prefill_tokens=512, ranks=(16, 64))
    assert told["tenants"] == 5
    assert [arm["name"] for arm in told["arms"]] == ["Scute", "LoRA 16", "LoRA 64"]
    for arm, expected in zip(told["arms"], found.arms, strict=True):
        assert arm["memory"] == expected.memory
        for kind in ("decode", "prefill"):
            step = getattr(expected, kind)
            assert arm[kind]["bytes"] == step.bytes
            assert arm[kind]["total_ms"] == pytest.approx(sum(step.ms.values()))
            assert arm[kind]["ms"][arm[kind]["dominant"]] == max(step.ms.values())
    assert [fit["kv_tokens"] for fit in told["fits"]] == [fit.kv_tokens for fit in found.fits]
    assert told["notes"] == list(found.notes)
    assert told["figures"]["sources"]["launch_us"]


def test_text_has_every_arm_and_route(base, pool):
    result = scute("--base", base, "--pool", pool / "vera", "--pool", pool / "oft", *GPU, "--rank", 256)
    assert result.exit_code == 0, result.output
    for part in ("2 adapters", "NVIDIA H200", "Scute", "LoRA 256", "shared pair", "rotation", "launches", "KV cache"):
        assert part in result.output
    assert "floor" in result.output
    assert "1 adapter on" in scute("--base", base, "--pool", pool / "oft", *GPU).output


def test_what_stands_in_and_what_does_not_fit_is_told(base, pool, cache):
    def notes(gpu, *more):
        result = scute("--base", base, "--pool", pool, "--gpu", gpu, "--batch", 8, *more)
        assert result.exit_code == 0, result.output
        return result.output

    assert "stands in" not in notes("h200")
    assert "stands in" not in notes("a6000")
    sizes, model = read_base(base)
    large = dataclasses.replace(sizes, weight_bytes=140 * 2**30)
    told = predict(large, [read_tenant(pool / "oft", sizes, model)], find_device("h200"), rows=8)
    assert told.fits == ()
    assert "Nothing fits: the weights take 140.0 GiB" in told.notes[-1]
    folder = cache / "scute" / "devices"
    folder.mkdir(parents=True)
    (folder / "x.json").write_text(json.dumps({"name": "X1", "bandwidth_gb_s": 1500, "launch_us": 1}))
    assert "give --gpu-memory" in notes("x1")
    assert "KV cache, tokens" in notes("x1", "--gpu-memory", 80)
    assert "stands in" in notes("x1", "--gpu-memory", 80)  # no bandwidth within L2 is known


def test_ranks_may_be_listed_or_repeated(base, pool):
    def names(*ranks):
        told = json.loads(scute("--base", base, "--pool", pool, *GPU, *ranks, "--json").stdout)
        return [arm["name"] for arm in told["arms"][1:]]

    assert names() == ["LoRA 64"]
    assert names("--rank", "16,64") == names("--ranks", 16, "--rank", 64) == ["LoRA 16", "LoRA 64"]


def test_a_gpu_that_is_not_known(base, pool):
    def said(gpu):
        result = scute("--base", base, "--pool", pool, "--gpu", gpu, "--batch", 8)
        assert result.exit_code == 2
        return " ".join(result.output.replace("│", " ").split())

    for part in ("'t4'", "NVIDIA H200", "NVIDIA RTX A6000", "scute calibrate"):
        assert part in said("t4")
    assert "give more of the name" in said("nvidia")


def test_a_base_model_with_names_of_its_own(tmp_path):
    """GPT-2 calls hidden_size n_embd."""
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=40, n_positions=16))
    model.save_pretrained(tmp_path / "gpt2")
    recipe = Recipe("LoRA", LoraConfig, 1, ("c_attn",), {"r": 4, "fan_in_fan_out": True})
    write_adapter(model, recipe, tmp_path / "adapter")
    result = scute("--base", tmp_path / "gpt2", "--pool", tmp_path / "adapter", *GPU, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["arms"][0]["memory"]["a"] == 2 * 4 * 32 * 4
    assert told["fits"][0]["kv_bytes"] == told["fits"][0]["kv_tokens"] * 2 * 2 * 32 * 4


def test_latent_attention_keeps_one_vector():
    config = DeepseekV3Config(num_hidden_layers=3, kv_lora_rank=512, qk_rope_head_dim=64, num_attention_heads=16)
    assert _kv_elements(config) == 3 * (512 + 64)


@pytest.mark.parametrize("name", ["num_attention_heads", "num_hidden_layers"])
def test_a_cache_of_an_unknown_size(name):
    sizes = {"num_attention_heads": 4, "num_hidden_layers": 2, "head_dim": 8, "num_key_value_heads": 2}
    assert _kv_elements(SimpleNamespace(**sizes)) == 2 * 2 * 2 * 8
    del sizes[name]
    with pytest.raises(ValueError, match=rf"config\.json has no {name}"):
        _kv_elements(SimpleNamespace(**sizes))


def test_memory_of_the_gpu_decides_what_fits(base, pool):
    def fits(gib):
        result = scute("--base", base, "--pool", pool, *GPU, "--gpu-memory", gib, "--json")
        return json.loads(result.stdout)["fits"]

    small, large = fits(1), fits(2)
    assert small[0]["tenants"]["LoRA 64"] < small[0]["tenants"]["Scute"] < large[0]["tenants"]["Scute"]
    assert small[0]["tenants"]["Scute"] > small[1]["tenants"]["Scute"]


def test_plot(base, pool, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    result = scute("--base", base, "--pool", pool, *GPU, "--prefill-tokens", 512, "--plot", path)
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_gpu_without_constants_exits_with_1_until_it_is_measured(base, pool, cache):
    asked = "--base", base, "--pool", pool, "--gpu", "a100", "--batch", 8
    result = scute(*asked)
    assert result.exit_code == 1
    assert "scute calibrate" in result.output
    folder = cache / "scute" / "devices"
    folder.mkdir(parents=True)
    measured = {"name": "NVIDIA A100-SXM4-80GB", "bandwidth_gb_s": 1500, "launch_us": 1}
    (folder / "a100.json").write_text(json.dumps(measured))
    assert scute(*asked).exit_code == 0


def test_a_refused_adapter_exits_with_1(base, tmp_path):
    result = scute("--base", base, "--pool", tmp_path, *GPU)
    assert result.exit_code == 1
    assert result.output.startswith(f"refused: folder.incomplete\n{tmp_path.name}: ")
    told = json.loads(scute("--base", base, "--pool", tmp_path, *GPU, "--json").stdout)
    assert (told["predicted"], told["code"]) == (False, "folder.incomplete")


@pytest.mark.parametrize(
    "wrong",
    [
        ("--gpu", "nvidia"),
        ("--gpu", "none"),
        ("--batch", "0"),
        ("--rank", "0"),
        ("--rank", "16,x"),
        ("--rank", "1" * 5000),
        ("--gpu-memory", "inf"),
        ("--rank", "600"),
    ],
)
def test_wrong_usage_exits_with_2(base, pool, wrong):
    assert scute("--base", base, "--pool", pool, *GPU, *wrong).exit_code == 2
    assert scute("--base", pool, "--pool", pool, *GPU).exit_code == 2
    assert scute("--base", base, "--pool", pool / "nowhere", *GPU).exit_code == 2


def test_help_is_quick_and_the_counts_need_no_torch():
    heavy = "{'torch', 'vllm', 'transformers', 'matplotlib'} & set(sys.modules)"
    for imported in ("scute.cli.main", "scute.costs, scute.costs.figure, scute.costs.calibration"):
        subprocess.run([sys.executable, "-c", f"import sys, {imported}; assert not {heavy}, {heavy}"], check=True)
    for command in ("predict", "calibrate"):
        code = f"import sys; from scute.cli.main import app; app(['{command}', '--help'], standalone_mode=False)"
        subprocess.run([sys.executable, "-c", f"{code}; assert not {heavy}, {heavy}"], check=True)

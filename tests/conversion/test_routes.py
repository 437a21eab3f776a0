"""Exact routes, the folder that is written, and what is refused."""

import copy
import dataclasses
import json

import pytest
import torch
from peft import IA3Config, LoraConfig, OFTConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel
from workshop import workshop_of

from scute.admission import BaseModel, compile_adapter
from scute.admission.base_folder import BaseWeights
from scute.agreement import agreement, random_prompts
from scute.algebra import update
from scute.conversion import folder as lora_folder
from scute.conversion import moments, prompts, run
from scute.conversion.distillation import remove_state
from scute.conversion.prompts import read_prompts
from scute.errors import Code, Refusal
from scute.testing.adapters import AMPLIFIED, Recipe
from scute.testing.tiny import tiny_prompts, tiny_qwen2

FLOAT32 = 1e-4
"""0.01 %: the bound on the error of an exact route, as a share of the effect."""


def pefts(shop, adapter, out):
    return agreement(*(shop.oracle.logprobs(shop.prompts, folder) for folder in (None, adapter, out)))


@pytest.mark.parametrize(
    ("name", "rank"), [("vera", 256), ("vera-regenerated", 256), ("lora-r8", 8), ("lora-r3", 64), ("rslora-r16", 16)]
)
def test_exact_routes(tiny, name, rank):
    adapter = tiny.adapter(name, name)
    out, done = tiny.convert(adapter, f"{name}-exact", rank)
    assert {layer.route for layer in done.layers} == {"exact"}
    assert done.left_out < 1e-10
    assert done.agreement.ratio <= FLOAT32
    assert pefts(tiny, adapter, out).ratio <= FLOAT32


def test_a_lora_passes_through_at_its_own_rank(tiny):
    out, done = tiny.convert(tiny.adapter("lora-r3", "lora-r3"), "lora-r3-through", 64)
    assert {layer.rank for layer in done.layers} == {3}
    assert json.loads((out / "adapter_config.json").read_text())["r"] == 3


@pytest.mark.parametrize("name", ["ia3", "dora", "oft-cayley", "vera"])
def test_at_full_rank_an_svd_loses_nothing(tiny, name):
    """Ranks are then those of the layers: PEFT has to read them from rank_pattern."""
    adapter = tiny.adapter(name, name)
    out, done = tiny.convert(adapter, f"{name}-full", 192)
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["rank_pattern"] == config["alpha_pattern"] != {}
    assert {layer.rank for layer in done.layers} == {64, 128}
    assert done.left_out < 1e-9
    assert pefts(tiny, adapter, out).ratio <= FLOAT32


def test_the_folder_compiles_to_what_was_reported(tiny):
    adapter = tiny.adapter("oft", "oft")
    out, done = tiny.convert(adapter, "oft-compiled", 16)
    base = BaseModel.from_module(tiny.oracle.base)
    exact, converted = (compile_adapter(folder, base).members for folder in (adapter, out))
    for layer in done.layers:
        weight = tiny.oracle.base.get_submodule(layer.module).weight.detach().T
        change, carried = update(exact[layer.module], weight), update(converted[layer.module], weight)
        assert layer.update == pytest.approx(float(change.square().sum()), rel=1e-4)
        assert layer.left_out == pytest.approx(float((change - carried).square().sum()) / layer.update, rel=1e-4)


def test_dora_is_converted_whole(tiny):
    _, done = tiny.convert(tiny.adapter("dora", "dora"), "dora-16", 16)
    assert {layer.route for layer in done.layers} == {"svd"}
    assert "DoRA" in done.notes[0]


def test_targets_are_short_names_only_where_they_mean_the_same(tiny):
    few = Recipe("LoRA", LoraConfig, 1, ("model.layers.1.mlp.up_proj",), {"r": 4}, 1)
    for recipe, name, targets in [
        (few, "few", ["model.layers.1.mlp.up_proj"]),
        (AMPLIFIED["lora-r3"], "lora-r3", ["down_proj", "q_proj", "v_proj"]),
    ]:
        out, _ = tiny.convert(tiny.adapter(recipe, name), f"{name}-targets", 64)
        assert json.loads((out / "adapter_config.json").read_text())["target_modules"] == targets


def test_without_measuring_the_model_is_not_loaded(tiny, monkeypatch):
    monkeypatch.setattr(run, "load_model", None)
    _, done = tiny.convert(tiny.adapter("ia3", "ia3"), "ia3-unmeasured", 8, data=None, measured=False)
    assert done.agreement is None
    assert 0 < done.left_out < 1


@pytest.mark.parametrize(("name", "rank"), [("vera", 256), ("lora-r3", 8), ("rslora-r16", 16)])
def test_what_is_exact_needs_no_weights(tiny, name, rank, tmp_path):
    """The config of the base model is enough."""
    (tmp_path / "config.json").write_bytes((tiny.base / "config.json").read_bytes())
    (tmp_path / "model.safetensors.index.json").write_text("damaged")
    bare = dataclasses.replace(tiny, base=tmp_path, root=tmp_path)
    adapter = tiny.adapter(name, name)
    out, done = bare.convert(adapter, "out", rank, data=None, measured=False)
    assert {layer.route for layer in done.layers} == {"exact"}
    assert done.left_out < 1e-10
    assert all(layer.update > 0 for layer in done.layers)
    assert pefts(tiny, adapter, out).ratio <= FLOAT32
    with pytest.raises(Refusal, match="index"):
        bare.convert(tiny.adapter("ia3", "ia3"), "inexact", 8, data=None, measured=False)


def test_without_data_it_is_measured_on_random_tokens(tiny):
    adapter = tiny.adapter("ia3", "ia3")
    out, done = tiny.convert(adapter, "ia3-random", 8, data=None)
    prompts = random_prompts(256)
    independent = agreement(*(tiny.oracle.logprobs(prompts, folder) for folder in (None, adapter, out)))
    assert done.measured_on == "random tokens"
    assert done.agreement.ratio == pytest.approx(independent.ratio, rel=1e-3)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    root = tmp_path_factory.mktemp("qwen")
    return workshop_of(tiny_qwen2(root / "base"), root, tiny_prompts())


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "scales the base bias"),
        (LoraConfig(target_modules=["o_proj"], lora_bias=True), "bias of its own"),
        (LoraConfig(target_modules=["q_proj"], bias="lora_only"), "bias of its own"),
        (OFTConfig(target_modules=["q_proj"], oft_block_size=32, bias="oft_only"), "bias of its own"),
    ],
    ids=["ia3", "lora_bias", "lora_only", "oft_only"],
)
def test_a_bias_is_refused(qwen, config, what, tmp_path):
    get_peft_model(copy.deepcopy(qwen.oracle.base), config).save_pretrained(str(tmp_path))
    with pytest.raises(Refusal, match=what) as refused:
        qwen.convert(tmp_path, "refused", 8)
    assert refused.value.code == Code.CONVERSION_BIAS
    assert not (qwen.root / "refused").exists()


def test_doras_base_bias_stays(qwen):
    adapter = qwen.adapter("dora", "dora")
    out, _ = qwen.convert(adapter, "dora-full", 192)
    assert pefts(qwen, adapter, out).ratio <= FLOAT32


def test_a_folder_in_the_way_is_kept(tiny):
    adapter = tiny.adapter("lora-r3", "lora-r3")
    out, _ = tiny.convert(adapter, "kept", 8)
    before = (out / "adapter_model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match="--force"):
        tiny.convert(tiny.adapter("lora-r8", "lora-r8"), "kept", 8, force=False)
    assert (out / "adapter_model.safetensors").read_bytes() == before
    (out / "optimizer.pt").write_bytes(b"precious")
    with pytest.raises(FileExistsError, match=r"also has 'optimizer\.pt'"):
        tiny.convert(adapter, "kept", 8)
    with pytest.raises(FileExistsError, match="which is read"):
        tiny.convert(adapter, adapter.name, 8)


def test_a_state_folder_keeps_what_is_not_of_the_state(tiny):
    state = tiny.root / ".stated.distill"
    state.mkdir()
    (state / "notes.txt").write_text("precious")
    remove_state(state)
    assert (state / "notes.txt").exists()


def test_a_write_that_fails_leaves_what_was_there(tiny, monkeypatch):
    out, _ = tiny.convert(tiny.adapter("lora-r3", "lora-r3"), "whole", 8)
    before = (out / "adapter_model.safetensors").read_bytes()

    def full_disk(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr(lora_folder, "save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        tiny.convert(tiny.adapter("lora-r8", "lora-r8"), "whole", 8)
    assert (out / "adapter_model.safetensors").read_bytes() == before
    assert list(tiny.root.glob(".whole*")) == []


def test_shards_and_what_is_not_a_plain_weight(tmp_path):
    projection = BaseModel.from_module(torch.nn.Sequential(torch.nn.Linear(3, 2))).projections["0"]
    first, second = torch.randn(2, 3, dtype=torch.bfloat16), torch.ones(2, 3, dtype=torch.int8)
    save_file({"0.weight": first}, tmp_path / "a.safetensors")
    packed, spoilt = torch.ones(6, 1), torch.full((2, 3), torch.nan)
    save_file({"1.weight": second, "2.weight": packed, "4.weight": spoilt}, tmp_path / "b.safetensors")
    index = {
        "0.weight": "a.safetensors",
        "1.weight": "b.safetensors",
        "2.weight": "b.safetensors",
        "4.weight": "b.safetensors",
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    weights = BaseWeights(tmp_path)
    assert torch.equal(weights.read("0", projection), first.T.float())
    for module, what in [("1", "quantised"), ("2", "packed"), ("3", "not in the folder"), ("4", "NaN")]:
        with pytest.raises(Refusal, match=what) as refused:
            weights.read(module, projection)
        assert refused.value.code == Code.CONVERSION_WEIGHT


def test_text_is_cut_and_bad_lines_are_named(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"tokens": [1]}\n\n{"tokens": [1, 2, 3]}\n{"tokens": [4, 5]}\n')
    assert read_prompts(path, tmp_path, 8, 600) == [[1, 2, 3], [4, 5]]
    assert read_prompts(path, tmp_path, 1, 600) == [[1, 2, 3]]
    path.write_text(json.dumps({"tokens": list(range(600))}))
    assert [len(prompt) for prompt in read_prompts(path, tmp_path, 8, 600)] == [512]
    for text, what in [
        ('{"question": "?"}', "line 1"),
        ("[]", "line 1"),
        ('\n\n{"tokens": 7}', "line 3"),
        ('{"tokens": ["1", 2]}', "line 1"),
        ('{"tokens": [1, 2.5]}', "line 1"),
        ("[" * 100_000, "line 1"),
        ('{"tokens": [1, 2]}\n{"tokens": [1, 600]}', "line 2: token 600 is not one of the base model's 600"),
        ('{"tokens": [1, -1]}', "token -1"),
        ("nonsense", "line 1"),
        ("", "no line"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=what):
            read_prompts(path, tmp_path, 8, 600)


def test_a_line_ends_at_a_line_feed_only(tmp_path, monkeypatch):
    """JSON may hold U+2028 and U+0085 as they are, and so may text."""
    monkeypatch.setattr(prompts, "_tokenizer_of", lambda _: lambda text: [ord(c) for c in text])
    text = "  a\u2028b\u0085c\x0bd "
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    (tmp_path / "a.txt").write_text(text + "\n\n")
    for name in ("a.jsonl", "a.txt"):
        assert read_prompts(tmp_path / name, tmp_path, 8, 9000) == [[ord(c) for c in text]]
        with pytest.raises(ValueError, match=r"line 1: token 8232"):
            read_prompts(tmp_path / name, tmp_path, 8, 8000)
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"a\.txt is not text in UTF-8"):
        read_prompts(tmp_path / "a.txt", tmp_path, 8, 9000)


def test_a_base_model_without_a_tokenizer_or_with_damaged_weights(tiny, tmp_path):
    (tmp_path / "a.txt").write_text("The sea is wide.")
    with pytest.raises(ValueError, match="no tokenizer that can be loaded"):
        read_prompts(tmp_path / "a.txt", tiny.base, 8, 256)
    (tmp_path / "config.json").write_bytes((tiny.base / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((tiny.base / "model.safetensors").read_bytes()[:1000])
    damaged = dataclasses.replace(tiny, base=tmp_path, root=tmp_path)
    with pytest.raises(ValueError, match="cannot load the model"):
        damaged.convert(tiny.adapter("lora-r3", "lora-r3"), "out", 8)
    with pytest.raises(Refusal, match="cannot be read"):
        damaged.convert(tiny.adapter("ia3", "ia3"), "out", 8)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(Refusal, match="cannot be read"):
        damaged.convert(tiny.adapter("ia3", "ia3"), "out", 8)
    assert not (tmp_path / "out").exists()


def test_text_goes_through_the_tokenizer(demo, tmp_path):
    lines = ["The sea is wide.", "Leaves turn red."]
    (tmp_path / "a.txt").write_text("\n\n".join(lines))
    objects = [{"text": lines[0]}, {"prompt": "Leaves turn", "completion": " red."}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, objects)))
    read = read_prompts(tmp_path / "a.txt", demo.base, 8, 49152)
    assert read == read_prompts(tmp_path / "a.jsonl", demo.base, 8, 49152)
    assert all(len(prompt) >= 4 for prompt in read)


def test_the_tensors_are_named_as_peft_names_them(tiny):
    out, _ = tiny.convert(tiny.adapter("oft", "oft"), "oft-names", 8)
    tensors = load_file(out / "adapter_model.safetensors")
    by_peft = load_file(tiny.adapter("lora-r8", "lora-r8") / "adapter_model.safetensors")
    assert {name: t.shape for name, t in tensors.items()} == {name: t.shape for name, t in by_peft.items()}


def test_weights_that_are_stored_the_other_way_round(tmp_path):
    """GPT-2 has transformers' Conv1D; (IA)3 on the input of its MLP is a diagonal R, and leaves the bias alone."""
    config = GPT2Config(vocab_size=256, n_embd=32, n_layer=1, n_head=2, n_positions=64, n_inner=32)
    model = GPT2LMHeadModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "base")
    shop = workshop_of(tmp_path / "base", tmp_path, tiny_prompts())
    targets = {"feedforward_modules": ["mlp.c_proj"], "fan_in_fan_out": True}
    adapter = shop.adapter(Recipe("(IA)3", IA3Config, 1, ("mlp.c_proj",), targets), "ia3")
    out, done = shop.convert(adapter, "out", 32)
    assert done.left_out < 1e-9
    assert json.loads((out / "adapter_config.json").read_text())["fan_in_fan_out"] is True
    assert pefts(shop, adapter, out).ratio <= FLOAT32


def test_moments_do_not_depend_on_how_many_passes_they_take(tiny, monkeypatch):
    modules = {"model.layers.0.self_attn.q_proj": 128, "model.layers.1.mlp.down_proj": 192}
    at_once = dict(moments.second_moments(tiny.oracle.base, {}, tiny.prompts, modules))
    monkeypatch.setattr(moments, "GROUP_BYTES", 1)
    one_by_one = dict(moments.second_moments(tiny.oracle.base, {}, tiny.prompts, modules))
    assert at_once.keys() == one_by_one.keys() == modules.keys()
    assert all(torch.equal(at_once[name], one_by_one[name]) for name in modules)
    assert all(moment.shape == (modules[name], modules[name]) for name, moment in at_once.items())

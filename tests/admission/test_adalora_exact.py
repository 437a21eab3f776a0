"""AdaLoRA against PEFT's forward, before and after its training has dropped directions."""

import copy
import json

import pytest
import torch
from peft import AdaLoraConfig, PeftModel, get_peft_model
from peft_oracle import assert_exact, randomise, rewrite_config, rewrite_tensors, save, toy

from scute.admission import BaseModel, compile_adapter
from scute.algebra import fold, live_slots
from scute.errors import Code, Refusal

ALL = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Q = "layers.0.self_attn.q_proj"

CASES = {
    "row11-defaults": {},
    "row11-alpha": {"lora_alpha": 5, "init_r": 3},
    "row11-no alpha": {"lora_alpha": 0, "init_r": 4},
    "row11-bias lora_only": {"bias": "lora_only"},
    "row11-bias all": {"bias": "all"},
    "row11-fields of LoRA that its layer ignores": {"use_rslora": True, "alpha_pattern": {"q_proj": 99}, "r": 8},
}


@pytest.mark.parametrize("case", CASES)
def test_equals_peft(case, tmp_path):
    base = toy()
    config = AdaLoraConfig(target_modules=ALL, total_step=10, **CASES[case])
    form = assert_exact(tmp_path, base, save(tmp_path, base, config))
    assert form.method == "AdaLoRA"


def pruned(folder, kept, **options):
    """Save an adapter that keeps the directions of `kept` (module to booleans); PEFT's model of the saved folder."""
    base = toy()
    adapted = get_peft_model(copy.deepcopy(base), AdaLoraConfig(target_modules=ALL, init_r=4, total_step=10, **options))
    randomise(adapted.eval())
    adapted.peft_config["default"].rank_pattern = {f"{name}.lora_E.default": each for name, each in kept.items()}
    adapted.save_pretrained(folder)
    assert json.loads((folder / "adapter_config.json").read_text())["rank_pattern"]
    return PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()


KEPT = {Q: [True, False, True, False], "layers.1.mlp.down_proj": [False, False, False, True]}


@pytest.mark.parametrize(
    ("kept", "options"),
    [
        pytest.param(KEPT, {"lora_alpha": 5}, id="row11-some-dropped"),
        pytest.param(KEPT, {"lora_alpha": 0}, id="row11-some-dropped-without-alpha"),
        pytest.param(KEPT | {"layers.0.self_attn.v_proj": [False] * 4}, {}, id="row11-all-of-one-dropped"),
        pytest.param({Q: [False] * 4}, {"bias": "lora_only"}, id="row11-a-bias-is-left"),
    ],
)
def test_dropped_directions_equal_peft(kept, options, tmp_path):
    adapted = pruned(tmp_path, kept, **options)
    form = assert_exact(tmp_path, toy(), adapted)
    ranks = {name: sum(kept.get(name, [1] * 4)) for name in form.members}
    assert {name: member.rank for name, member in form.members.items()} == ranks


def test_everything_folds_into_a(tmp_path):
    base = toy()
    save(tmp_path, base, AdaLoraConfig(target_modules=["q_proj"], total_step=10))
    member = compile_adapter(tmp_path, BaseModel.from_module(base)).members[Q]
    assert live_slots(member) == ("c", "d")
    assert live_slots(fold(member)[0]) == ()


@pytest.mark.parametrize(
    ("fields", "code", "culprit"),
    [
        ({"init_r": ...}, Code.CONFIG_INVALID, "init_r"),
        ({"init_r": 5}, Code.TENSOR_SHAPE, f"{Q}.lora_A"),
        ({"use_dora": True}, Code.CONFIG_UNSUPPORTED_FIELD, "use_dora"),
        ({"rank_pattern": {"x": [True]}}, Code.CONFIG_MISMATCH, "rank_pattern has 'x', which is no tensor"),
        ({"rank_pattern": {f"{Q}.lora_E": 3}}, Code.CONFIG_INVALID, "rank_pattern"),
        ({"rank_pattern": {f"{Q}.lora_E": [True, False]}}, Code.TENSOR_SHAPE, "expected [1, 24]"),
        ({"rank_pattern": {"q_proj.lora_E": [True] * 12}}, Code.CONFIG_MISMATCH, "'q_proj.lora_E', which is no tensor"),
        ({"trainable_token_indices": [1]}, Code.CONFIG_UNSUPPORTED_FIELD, "trainable_token_indices"),
    ],
)
def test_refusals(fields, code, culprit, tmp_path):
    base = toy(torch.float32)
    save(tmp_path, base, AdaLoraConfig(target_modules=["q_proj"], total_step=10))
    rewrite_config(tmp_path, **fields)
    with pytest.raises(Refusal) as refusal:
        compile_adapter(tmp_path, BaseModel.from_module(base))
    assert refusal.value.code is code
    assert culprit in refusal.value.sentence


def test_an_adapter_that_keeps_nothing_is_refused(tmp_path):
    pruned(tmp_path, dict.fromkeys([f"layers.{i}.self_attn.{p}_proj" for i in (0, 1) for p in "qv"], [False] * 4))
    rewrite_config(tmp_path, target_modules=["q_proj", "v_proj"])
    rewrite_tensors(tmp_path, lambda tensors: {n: t for n, t in tensors.items() if "q_proj" in n or "v_proj" in n})
    with pytest.raises(Refusal, match="leaves no direction") as refusal:
        compile_adapter(tmp_path, BaseModel.from_module(toy()))
    assert refusal.value.code is Code.CONFIG_MISMATCH

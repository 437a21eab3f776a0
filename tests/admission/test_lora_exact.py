"""LoRA and DoRA against PEFT's forward, in float64."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft_oracle import assert_exact, randomise, rewrite_tensors, save, toy

ALL = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
LAYER = ALL[:-1]

CASES = {
    "plain": {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 6},
    "every projection": {"target_modules": LAYER, "r": 3, "lora_alpha": 5},
    "rank-stabilised": {"target_modules": LAYER, "r": 5, "lora_alpha": 7, "use_rslora": True},
    "patterns": {
        "target_modules": LAYER,
        "r": 4,
        "rank_pattern": {r"0\.self_attn\.q_proj": 2, "q_proj": 3, "layers.1.mlp.*": 6},
        "alpha_pattern": {"proj": 99, "(v|o)_proj": 11, "layers.0.self_attn.v_proj": 3},
    },
    "patterns, rank-stabilised": {
        "target_modules": LAYER,
        "use_rslora": True,
        "rank_pattern": {"down_proj": 2},
        "alpha_pattern": {"down_proj": 9},
    },
    "lora_bias": {"target_modules": LAYER, "lora_bias": True, "lora_alpha": 3},
    "bias lora_only": {"target_modules": ["q_proj", "v_proj", "down_proj"], "bias": "lora_only"},
    "bias all": {"target_modules": ["q_proj", "v_proj"], "bias": "all"},
    "bias all, lora_bias": {"target_modules": ["q_proj", "v_proj"], "bias": "all", "lora_bias": True},
    "one layer": {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    "one layer, no pattern": {"target_modules": ["o_proj"], "layers_to_transform": 0, "layers_pattern": ["layers"]},
    "regex": {"target_modules": r"layers\.\d\.(self_attn|mlp)\.(q|down)_proj"},
    "excluded": {"target_modules": LAYER, "exclude_modules": ["up_proj", "layers.0.self_attn.q_proj"]},
    "excluded by regex": {"target_modules": LAYER, "exclude_modules": r".*\.0\..*"},
    "all-linear": {"target_modules": "all-linear"},
    "head": {"target_modules": ["lm_head"]},
    "a name that is not there": {"target_modules": ["q_proj", "w_pack"]},
    "orthogonal": {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": "orthogonal"},
}


@pytest.mark.parametrize("case", CASES)
def test_lora_equals_peft(case, tmp_path):
    base = toy()
    form = assert_exact(tmp_path, base, save(tmp_path, base, LoraConfig(**CASES[case])))
    assert form.method == "LoRA"


@pytest.mark.parametrize("case", [case for case in CASES if "lora_bias" not in CASES[case]])
def test_dora_equals_peft(case, tmp_path):
    base = toy()
    form = assert_exact(tmp_path, base, save(tmp_path, base, LoraConfig(use_dora=True, **CASES[case])))
    assert form.method == "DoRA"


def test_float32(tmp_path):
    base = toy(torch.float32)
    adapted = save(tmp_path, base, LoraConfig(use_dora=True, target_modules=LAYER))
    assert_exact(tmp_path, base, adapted, tolerance=1e-5)


def test_converted_pissa_is_plain_lora(tmp_path):
    base = toy(torch.float32)
    config = LoraConfig(target_modules=["q_proj", "down_proj"], r=4, init_lora_weights="pissa")
    adapted = get_peft_model(copy.deepcopy(base), config).eval()
    config.init_lora_weights = True
    adapted.save_pretrained(tmp_path / "start")
    config.init_lora_weights = "pissa"
    randomise(adapted)
    adapted.save_pretrained(tmp_path / "end", path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    form = assert_exact(tmp_path / "end", base, adapted, tolerance=1e-5)
    assert form.max_rank == 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_factors_keep_their_dtype(dtype, tmp_path):
    base = toy()
    adapted = save(tmp_path, base, LoraConfig(target_modules=["q_proj"], use_dora=True))
    rewrite_tensors(tmp_path, lambda tensors: {name: t.to(dtype) for name, t in tensors.items()})
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype).to(parameter.dtype)
    form = assert_exact(tmp_path, base, adapted)
    assert form.members["layers.0.self_attn.q_proj"].terms[0].a.dtype is dtype

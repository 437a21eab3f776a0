"""What is read from real transformers models, and PEFT's forward on them."""

import copy
import json
import time

import pytest
import torch
from peft import IA3Config, LoraConfig, VeraConfig
from peft_oracle import assert_exact, rewrite_config, save
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config

from scute.admission import BaseModel, Projection
from scute.admission.base_folder import read_base

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40}
QWEN = Qwen2Config(**TINY, num_attention_heads=4, num_key_value_heads=2)
GPT2 = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=40, n_positions=16)


def build(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("config", [QWEN, GPT2], ids=["Qwen2", "GPT-2"])
def test_config_and_module_agree(config):
    from_config = BaseModel.from_config(config, torch.float32)
    assert from_config == BaseModel.from_module(build(config), torch.float32)
    assert list(from_config.projections) == list(BaseModel.from_module(build(config)).projections)


def test_qwen2():
    base = BaseModel.from_config(QWEN, torch.bfloat16)
    assert base.projections["model.layers.1.self_attn.k_proj"] == Projection(32, 16, has_bias=True)
    assert base.projections["lm_head"] == Projection(32, 40, has_bias=False)
    assert base.gated_up["model.layers.0.mlp.down_proj"] == "model.layers.0.mlp.up_proj"
    assert (base.output_head, base.embeddings, base.dtype) == (
        "lm_head",
        {"model.embed_tokens": (40, 32)},
        torch.bfloat16,
    )
    assert QWEN.dtype is None


def test_gpt2_has_no_gated_mlp():
    base = BaseModel.from_config(GPT2, torch.float32)
    assert base.projections["transformer.h.0.attn.c_attn"] == Projection(32, 96, has_bias=True, transposed=True)
    assert base.gated_up == {}


def test_unknown_config_is_an_error():
    class Unknown(LlamaConfig):
        pass

    with pytest.raises(ValueError, match="Unknown"):
        BaseModel.from_config(Unknown(), torch.float32)


LLAMA = {"model_type": "llama", **TINY, "num_attention_heads": 4}


@pytest.mark.parametrize(
    "config",
    [
        {"num_attention_heads": 0},
        {"num_key_value_heads": 0},
        {"num_hidden_layers": -3},
        {"hidden_size": -1},
        {"hidden_size": 10**30},
        {"hidden_size": "many"},
        {"intermediate_size": None},
        {"dtype": "float99"},
        {"dtype": "int8"},
        {"pad_token_id": 9999},
        {"hidden_act": "nope"},
        {"rope_parameters": 3},
        {"quantization_config": 3},
        {"id2label": 3},
        {"model_type": "nope"},
        {"model_type": None},
        {"model_type": None, "auto_map": {"AutoConfig": "code.Config"}},
    ],
    ids=str,
)
def test_an_odd_config_is_named(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | config))
    with pytest.raises(ValueError, match=r"config\.json: \S"):
        read_base(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "7", "[]", "{}"])
def test_a_config_that_is_none(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json: \S"):
        read_base(tmp_path)


def test_a_large_config_is_fast():
    BaseModel.from_config(QWEN, torch.bfloat16)
    start = time.perf_counter()
    base = BaseModel.from_config(LlamaConfig(num_hidden_layers=32), torch.bfloat16)
    assert time.perf_counter() - start < 2
    assert len(base.projections) == 32 * 7 + 1


LLM = {
    "LoRA": LoraConfig(target_modules="all-linear", r=4, bias="lora_only"),
    "DoRA": LoraConfig(target_modules=["q_proj", "k_proj", "down_proj"], use_dora=True),
    "(IA)3": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "VeRA": VeraConfig(r=6, target_modules=["q_proj", "v_proj", "down_proj"]),
}


@pytest.mark.parametrize("method", LLM)
def test_qwen2_equals_peft(method, tmp_path):
    base = build(QWEN)
    adapted = save(tmp_path, base, LLM[method], spread=0.5)
    assert_exact(tmp_path, base, adapted, tolerance=1e-5, x=torch.arange(10).view(2, 5))


def test_all_linear_leaves_out_the_head(tmp_path):
    base = build(QWEN)
    adapted = save(tmp_path, base, LLM["LoRA"], spread=0.5)
    rewrite_config(tmp_path, target_modules="all-linear")
    form = assert_exact(tmp_path, base, adapted, tolerance=1e-5, x=torch.arange(10).view(2, 5))
    assert len(form.members) == 2 * 7


CONV1D = {
    "LoRA": LoraConfig(target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, bias="lora_only"),
    "DoRA": LoraConfig(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, use_dora=True),
    "(IA)3": IA3Config(
        target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"], fan_in_fan_out=True
    ),
    "VeRA": VeraConfig(r=6, target_modules=["c_attn"], fan_in_fan_out=True),
}


@pytest.mark.parametrize("method", CONV1D)
def test_gpt2_equals_peft(method, tmp_path):
    base = build(GPT2)
    adapted = save(tmp_path, base, CONV1D[method], spread=0.5)
    assert_exact(tmp_path, base, adapted, tolerance=1e-5, gated=False, x=torch.arange(10).view(2, 5))

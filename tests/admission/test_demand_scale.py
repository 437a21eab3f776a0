"""Scales, patterns and initialisations: section 2.5 of the demand list. Every id starts with its rows."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft_oracle import assert_exact, randomise, rewrite_config, save, toy

from scute.admission import BaseModel, compile_adapter
from scute.errors import Code, Refusal

ALL = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PATTERNS = {
    "rank_pattern": {r"^layers\.0\.self_attn\.q_proj": 2, r"layers\.\d\.mlp\.(up|gate)_proj": 5, "o_proj": 3},
    "alpha_pattern": {r"^layers\.1\.": 9, "mlp.down_proj": 11, "_proj": 99, "v_proj": 3},
}


@pytest.mark.parametrize("rank", [1, 4, 16, 65], ids="rank{}".format)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="row49-row50-rsLoRA"),
        pytest.param({"use_dora": True}, id="row50-rsLoRA-with-DoRA"),
        pytest.param(PATTERNS, id="row50-row51-rsLoRA-with-patterns"),
    ],
)
def test_rank_stabilised_scales(rank, options, tmp_path):
    base = toy()
    config = LoraConfig(target_modules=ALL, r=rank, lora_alpha=7, use_rslora=True, **options)
    form = assert_exact(tmp_path, base, save(tmp_path, base, config, spread=0.2))
    if not options:
        assert {term.c for member in form.members.values() for term in member.terms} == {7 / rank**0.5}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(PATTERNS, id="row51-expressions-and-anchors"),
        pytest.param({"rank_pattern": {"^q_proj": 2, "^layers": 3}}, id="row51-anchors-that-do-not-match"),
        pytest.param({"rank_pattern": {"q_proj": 6, "self_attn.q_proj": 2}}, id="row51-the-first-wins"),
        pytest.param({"alpha_pattern": {"layers.1.self_attn.v_proj": 40}}, id="row51-a-whole-name"),
        pytest.param({"rank_pattern": {"proj": 2}, "alpha_pattern": {"attn": 2}}, id="row51-half-a-name-is-none"),
        pytest.param({"alpha_pattern": {"q_proj": 0.5}, "use_dora": True}, id="row51-DoRA"),
    ],
)
def test_patterns_equal_peft(options, tmp_path):
    base = toy()
    config = LoraConfig(target_modules=ALL, r=4, lora_alpha=6, **options)
    assert_exact(tmp_path, base, save(tmp_path, base, config))


def test_row51_the_order_is_that_of_the_file(tmp_path):
    """PEFT sorts the keys when it saves, so that another may come first when it loads."""
    base = toy()
    save(tmp_path, base, LoraConfig(target_modules=ALL, alpha_pattern={"self_attn.q_proj": 2, "q_proj": 60}))
    form = assert_exact(tmp_path, base, PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval())
    assert form.members["layers.0.self_attn.q_proj"].terms[0].c == 60 / 8


def start_and_end(init, folder):
    """PEFT's model under an initialisation that changed its base weights; its folder at the start of training."""
    config = LoraConfig(target_modules=["q_proj", "down_proj"], r=4, init_lora_weights=init)
    adapted = get_peft_model(copy.deepcopy(toy(torch.float32)), config).eval()
    config.init_lora_weights = True
    adapted.save_pretrained(folder / "start")
    config.init_lora_weights = init
    randomise(adapted)
    return adapted


@pytest.mark.parametrize(
    "init",
    [
        pytest.param("pissa", id="row52-PiSSA"),
        pytest.param("pissa_niter_4", id="row20-row52-fast-PiSSA"),
        pytest.param("olora", id="row52-OLoRA"),
    ],
)
@pytest.mark.parametrize("converted", [True, False], ids=["converted", "unconverted"])
def test_initialisations_that_change_the_base(init, converted, tmp_path):
    adapted = start_and_end(init, tmp_path)
    if converted:
        adapted.save_pretrained(tmp_path / "end", path_initial_model_for_weight_conversion=str(tmp_path / "start"))
        form = assert_exact(tmp_path / "end", toy(torch.float32), adapted, tolerance=1e-5)
        assert form.max_rank == 8
        return
    adapted.save_pretrained(tmp_path / "end")
    with pytest.raises(Refusal, match="path_initial_model_for_weight_conversion") as refusal:
        compile_adapter(tmp_path / "end", BaseModel.from_module(toy(torch.float32)))
    assert refusal.value.code is Code.INIT_CHANGED_BASE


@pytest.mark.parametrize(
    "init", ["corda", "loftq", "lora_ga", "PiSSA", "pissa_niter_16"], ids="row52-unconverted-{}".format
)
@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_other_initialisations_that_change_the_base(init, dora, tmp_path):
    save(tmp_path, toy(torch.float32), LoraConfig(target_modules=["q_proj"], use_dora=dora))
    rewrite_config(tmp_path, init_lora_weights=init)
    with pytest.raises(Refusal, match=init) as refusal:
        compile_adapter(tmp_path, BaseModel.from_module(toy(torch.float32)))
    assert refusal.value.code is Code.INIT_CHANGED_BASE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["row53-row56-float32", "row53-row54-float64"])
def test_every_projection_equals_peft(dtype, tmp_path):
    """Not the answers alone: `assert_exact` holds the output of every projection against PEFT's."""
    base = toy(dtype)
    adapted = save(tmp_path, base, LoraConfig(target_modules=ALL, r=8, lora_alpha=32))
    assert_exact(tmp_path, base, adapted, tolerance=1e-5 if dtype is torch.float32 else 1e-12)

"""Names and prefixes: section 2.4 of the demand list. Every id starts with the rows of docs/demand.md that it shows."""

import pytest
import torch
import transformers as hf
from peft import IA3Config, LoraConfig, OFTConfig, VeraConfig
from peft_oracle import assert_exact, outputs_of, relative, rewrite_config, rewrite_tensors, save, served, toy
from safetensors.torch import load_file
from tiny_bases import GATED_DELTA_NET, LLAMA, MIXTRAL, PHI3, QWEN3_5, TOKENS, WRAPPERS, build, known, text_of

from scute.admission import BaseModel, compile_adapter
from scute.admission.tensors import TENSOR_FILE
from scute.errors import Code, Refusal

LORA = LoraConfig(target_modules=["q_proj", "down_proj"], r=3, lora_alpha=5)
ROOT = "base_model.model."


def renamed(old, new):
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def refused(folder, base) -> Refusal:
    with pytest.raises(Refusal) as refusal:
        compile_adapter(folder, base)
    return refusal.value


# a prefix that PEFT does not write


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        pytest.param(ROOT, "", Code.TENSOR_PREFIX, id="row35-none"),
        pytest.param(ROOT, "base_model.", Code.TENSOR_PREFIX, id="row35-half"),
        pytest.param(ROOT, "module." + ROOT, Code.TENSOR_PREFIX, id="row35-data-parallel"),
        pytest.param(ROOT, "base_model.model._orig_mod.", Code.TENSOR_PREFIX, id="row35-compiled"),
        pytest.param(ROOT, "base_model.model._fsdp_wrapped_module.", Code.TENSOR_PREFIX, id="row35-sharded"),
        pytest.param(".weight", ".default.weight", Code.TENSOR_PREFIX, id="row35-adapter-name"),
        pytest.param(ROOT, ROOT + "model.", Code.TENSOR_NO_MODULE, id="row35-one-level-more"),
        pytest.param(ROOT, ROOT + "language_model.model.", Code.TENSOR_NO_MODULE, id="row36-of-a-wrapper"),
        pytest.param(ROOT, ROOT + "transformer.", Code.TENSOR_NO_MODULE, id="row48-of-another-model"),
        pytest.param("layers.1.mlp", "layers.1.ffn", Code.TENSOR_NO_MODULE, id="row35-one-module"),
        pytest.param("q_proj", "q_proj.linear", Code.TENSOR_NO_MODULE, id="row38-inner-linear"),
        pytest.param("layers.0.self_attn", "0.self_attn", Code.TENSOR_NO_MODULE, id="row35-an-ending-is-no-name"),
    ],
)
def test_a_name_that_matches_nothing_is_refused(old, new, code, tmp_path):
    base = toy(torch.float32)
    save(tmp_path, base, LORA)
    rewrite_tensors(tmp_path, renamed(old, new))
    refusal = refused(tmp_path, BaseModel.from_module(base))
    assert refusal.code is code
    assert any(refusal.sentence.startswith(name) for name in load_file(tmp_path / TENSOR_FILE))


# the language model of a wrapper


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(LORA, id="row36-row40-LoRA"),
        pytest.param(LoraConfig(target_modules="all-linear", use_dora=True, r=2), id="row36-row41-DoRA"),
        pytest.param(VeraConfig(target_modules=["k_proj", "down_proj"], save_projection=False), id="row36-VeRA"),
        pytest.param(OFTConfig(target_modules=["o_proj", "gate_proj"], oft_block_size=4), id="row36-row38-OFT"),
        pytest.param(IA3Config(target_modules=["v_proj"], feedforward_modules=[]), id="row36-IA3"),
    ],
)
def test_an_adapter_of_the_text_alone_serves_a_wrapper(kind, config, tmp_path):
    wrapper = build(WRAPPERS[kind], hf.AutoModelForImageTextToText)
    text = text_of(wrapper)
    adapted = save(tmp_path, text, config)
    form = compile_adapter(tmp_path, BaseModel.from_module(wrapper))
    assert all("language_model." in name for name in form.members)
    expected, found, plain = (outputs_of(m, TOKENS)[""] for m in (adapted, served(wrapper, form), text))
    assert relative(outputs_of(wrapper, TOKENS)[""], plain) <= 1e-5
    assert relative(found, expected) <= 1e-5
    assert relative(expected, plain) >= 0.01


SPELLINGS = ["model.language_model.", "language_model.model.", "model.text_model.", "text_model.model."]


@pytest.mark.parametrize(
    ("base_kind", "spelling"),
    [
        *[pytest.param("text", spelling, id=f"row36-text-{spelling}") for spelling in [*SPELLINGS, "language_model."]],
        *[pytest.param("wrapper", spelling, id=f"row36-wrapper-{spelling}") for spelling in ["model.", *SPELLINGS[1:]]],
    ],
)
def test_every_spelling_of_the_text_model(base_kind, spelling, tmp_path):
    wrapper = build(WRAPPERS["gemma3"], hf.AutoModelForImageTextToText)
    text = text_of(wrapper)
    adapted = save(tmp_path, text, LoraConfig(target_modules=["q_proj", "lm_head"], bias="all"))
    rewrite_tensors(tmp_path, renamed(f"{ROOT}model.", f"{ROOT}{spelling}"))
    base = wrapper if base_kind == "wrapper" else text
    form = compile_adapter(tmp_path, known(base))
    assert set(form.members) <= set(known(base).projections)
    assert relative(outputs_of(served(base, form), TOKENS)[""], outputs_of(adapted, TOKENS)[""]) <= 1e-5


def test_row36_patterns_are_those_of_the_names_that_were_trained(tmp_path):
    wrapper = build(WRAPPERS["gemma3"], hf.AutoModelForImageTextToText)
    config = LoraConfig(
        target_modules=r"^model\.layers\.[01]\.self_attn\.(q|k)_proj$", rank_pattern={"^model.layers.1.*": 5}, r=3
    )
    adapted = save(tmp_path, text_of(wrapper), config)
    form = compile_adapter(tmp_path, BaseModel.from_module(wrapper))
    assert {name: member.rank for name, member in form.members.items()} == {
        f"model.language_model.layers.{layer}.self_attn.{part}_proj": (3, 5)[layer] for layer in (0, 1) for part in "qk"
    }
    assert relative(outputs_of(served(wrapper, form), TOKENS)[""], outputs_of(adapted, TOKENS)[""]) <= 1e-5


def test_row36_an_adapter_of_the_wrapper_itself(tmp_path):
    wrapper = build(WRAPPERS["gemma3"], hf.AutoModelForImageTextToText)
    config = LoraConfig(target_modules=r".*language_model.*(q|down)_proj")
    assert_exact(tmp_path, wrapper, save(tmp_path, wrapper, config), tolerance=1e-5, x=TOKENS)


def test_row41_an_adapter_of_the_tower_is_refused_by_the_text_model(tmp_path):
    wrapper = build(WRAPPERS["gemma3"], hf.AutoModelForImageTextToText)
    save(tmp_path, wrapper, LoraConfig(target_modules=["q_proj"]))
    refusal = refused(tmp_path, BaseModel.from_module(text_of(wrapper)))
    assert refusal.code is Code.TENSOR_NO_MODULE
    assert "model.vision_tower" in refusal.sentence


def test_row37_an_adapter_of_hybrid_attention_in_its_wrapper(tmp_path):
    """transformers builds the language model alone of this config; the adapter was trained on the whole."""
    whole = build(QWEN3_5, hf.AutoModelForImageTextToText)
    config = LoraConfig(target_modules=r".*language_model.*(in_proj_\w+|out_proj|q_proj|down_proj)", r=3)
    adapted = save(tmp_path, whole, config)
    text = text_of(whole)
    form = compile_adapter(tmp_path, BaseModel.from_config(QWEN3_5, torch.float32))
    assert any(".linear_attn.in_proj" in name for name in form.members)
    assert relative(outputs_of(served(text, form), TOKENS)[""], outputs_of(adapted, TOKENS)[""]) <= 1e-5


def test_row37_packed_names_of_linear_attention(tmp_path):
    base = build(GATED_DELTA_NET)
    config = LoraConfig(target_modules=["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"], r=3)
    form = assert_exact(tmp_path, base, save(tmp_path, base, config), tolerance=1e-5, x=TOKENS)
    assert "model.layers.0.linear_attn.in_proj_qkvz" in form.members


# packed projections


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(LoraConfig(target_modules=["qkv_proj", "gate_up_proj"], r=3), id="row42-LoRA"),
        pytest.param(LoraConfig(target_modules="all-linear", r=3, use_dora=True), id="row42-DoRA"),
        pytest.param(
            IA3Config(target_modules=["qkv_proj", "down_proj"], feedforward_modules=["down_proj"]), id="row42-IA3"
        ),
        pytest.param(VeraConfig(target_modules=["qkv_proj", "gate_up_proj"], r=6), id="row42-VeRA"),
        pytest.param(OFTConfig(target_modules=["qkv_proj", "down_proj"], oft_block_size=4), id="row42-OFT"),
    ],
)
def test_a_packed_base_takes_packed_names(config, tmp_path):
    base = build(PHI3)
    assert_exact(tmp_path, base, save(tmp_path, base, config), tolerance=1e-5, x=TOKENS)


@pytest.mark.parametrize(
    ("trained", "targets", "served_on", "hint"),
    [
        pytest.param(PHI3, "qkv_proj", LLAMA, "q_proj, k_proj, v_proj in its place", id="row42-packed-for-split"),
        pytest.param(PHI3, "gate_up_proj", LLAMA, "gate_proj, up_proj in its place", id="row42-packed-mlp-for-split"),
        pytest.param(LLAMA, "k_proj", PHI3, "it has qkv_proj in place of", id="row42-split-for-packed"),
        pytest.param(LLAMA, "up_proj", PHI3, "it has gate_up_proj in place of", id="row42-split-mlp-for-packed"),
    ],
)
def test_packed_names_are_not_guessed(trained, targets, served_on, hint, tmp_path):
    save(tmp_path, build(trained), LoraConfig(target_modules=[targets]))
    refusal = refused(tmp_path, BaseModel.from_config(served_on, torch.float32))
    assert refusal.code is Code.TENSOR_NO_MODULE
    assert hint in refusal.sentence


def test_row42_packed_attention_of_another_name(tmp_path):
    save(tmp_path, build(PHI3), LoraConfig(target_modules=["qkv_proj"]))
    rewrite_tensors(tmp_path, renamed("qkv_proj", "c_attn"))
    assert "in which order c_attn" in refused(tmp_path, BaseModel.from_config(LLAMA, torch.float32)).sentence


# target_modules


@pytest.mark.parametrize(
    "targets",
    [
        pytest.param(["layers.0.self_attn.q_proj", "mlp.down_proj"], id="row43-longer-names"),
        pytest.param(["self_attn.q_proj"], id="row43-two-parts"),
        pytest.param(r".*\.(q|v)_proj", id="row43-expression"),
        pytest.param("all-linear", id="row43-all-linear"),
    ],
)
def test_targets_are_read_as_peft_reads_them(targets, tmp_path):
    base = toy()
    assert_exact(tmp_path, base, save(tmp_path, base, LoraConfig(target_modules=targets)))


@pytest.mark.parametrize(
    "targets",
    [
        pytest.param([ROOT + "layers.0.self_attn.q_proj"], id="row43-with-the-prefix-of-the-file"),
        pytest.param(["proj"], id="row43-part-of-a-name"),
        pytest.param(["w_pack"], id="row39-disjoint"),
    ],
)
def test_targets_that_name_nothing_are_refused(targets, tmp_path):
    base = toy(torch.float32)
    save(tmp_path, base, LORA)
    rewrite_config(tmp_path, target_modules=targets)
    refusal = refused(tmp_path, BaseModel.from_module(base))
    assert refusal.code is Code.CONFIG_MISMATCH
    assert "matches no linear projection" in refusal.sentence


# experts


@pytest.mark.parametrize(
    "parameters",
    [
        pytest.param(["mlp.experts.gate_up_proj"], id="row44-one-parameter"),
        pytest.param(["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], id="row45-both"),
    ],
)
def test_adapters_of_expert_parameters_are_refused(parameters, tmp_path):
    base = build(MIXTRAL)
    save(tmp_path, base, LoraConfig(target_modules=["q_proj"], target_parameters=parameters))
    refusal = refused(tmp_path, BaseModel.from_module(base))
    assert refusal.code is Code.CONFIG_UNSUPPORTED_FIELD
    assert "target_parameters" in refusal.sentence
    rewrite_config(tmp_path, target_parameters=None)
    refusal = refused(tmp_path, BaseModel.from_module(base))
    assert refusal.code is Code.MODULE_UNSUPPORTED
    assert "expert" in refusal.sentence


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("block_sparse_moe.experts.0.w1", id="row45-older-names"),
        pytest.param("mlp.experts.3.down_proj", id="row45-one-expert"),
    ],
)
def test_adapters_of_single_experts_are_refused(name, tmp_path):
    base = build(MIXTRAL)
    save(tmp_path, base, LoraConfig(target_modules=["q_proj"]))
    rewrite_tensors(tmp_path, renamed("self_attn.q_proj", name))
    refusal = refused(tmp_path, BaseModel.from_module(base))
    assert refusal.code is Code.MODULE_UNSUPPORTED
    assert "expert" in refusal.sentence


def test_row45_attention_of_a_base_with_experts(tmp_path):
    base = build(MIXTRAL)
    config = LoraConfig(target_modules=["q_proj", "o_proj"])
    assert_exact(tmp_path, base, save(tmp_path, base, config), tolerance=1e-5, x=TOKENS)


# the name of the base model


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("", id="row47-empty"),
        pytest.param(None, id="row47-null"),
        pytest.param(..., id="row47-missing"),
        pytest.param("/a/folder/of/another/machine", id="row47-another-folder"),
        pytest.param("someone/another-model", id="row47-another-name"),
    ],
)
def test_the_base_is_known_by_its_structure(name, tmp_path):
    base = toy()
    adapted = save(tmp_path, base, LORA)
    rewrite_config(tmp_path, base_model_name_or_path=name)
    assert_exact(tmp_path, base, adapted)


def test_row47_a_base_of_other_shapes_is_refused(tmp_path):
    save(tmp_path, build(LLAMA), LORA)
    other = hf.LlamaConfig(**LLAMA.to_dict() | {"hidden_size": 64})
    assert refused(tmp_path, BaseModel.from_config(other, torch.float32)).code is Code.TENSOR_SHAPE

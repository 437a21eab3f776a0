"""Heads, embeddings, vocabularies and biases: section 2.3 of the demand list. Every id starts with its rows."""

import json

import pytest
import torch
import transformers as hf
from peft import LoraConfig, PeftModel, get_peft_model
from peft_oracle import (
    assert_exact,
    outputs_of,
    randomise,
    relative,
    rewrite_config,
    rewrite_tensors,
    save,
    served,
    toy,
)
from safetensors.torch import load_file
from tiny_bases import LLAMA, TOKENS, build, known

from scute.admission import BaseModel, compile_adapter
from scute.admission.base_folder import read_base
from scute.admission.compile import find_form
from scute.admission.reasons import Reasons
from scute.admission.tensors import TENSOR_FILE
from scute.errors import Code, Refusal

ROOT = "base_model.model."
HEAD = f"{ROOT}lm_head.base_layer.weight"
EMBEDDING = f"{ROOT}model.embed_tokens.weight"
TIED = hf.LlamaConfig(**LLAMA.to_dict() | {"tie_word_embeddings": True})


def refused(folder, base) -> Refusal:
    with pytest.raises(Refusal) as refusal:
        compile_adapter(folder, base)
    return refusal.value


def saved(model, folder, config, **options):
    """The folder of a random adapter, with what PEFT saves beside it; that of its base model is next to it."""
    model.save_pretrained(folder / "base")
    adapted = get_peft_model(type(model).from_pretrained(folder / "base"), config).eval()
    randomise(adapted)
    adapted.save_pretrained(folder / "adapter", **options)
    return folder / "adapter"


# saved copies of base weights


@pytest.mark.parametrize(
    ("base", "targets", "copies"),
    [
        pytest.param(LLAMA, ["q_proj", "lm_head"], [HEAD], id="row27-row28-an-adapted-head"),
        pytest.param(TIED, ["q_proj", "lm_head"], [HEAD], id="row27-a-tied-head"),
        pytest.param(LLAMA, ["q_proj"], [EMBEDDING, f"{ROOT}lm_head.weight"], id="row27-row28-both-though-untouched"),
        pytest.param(TIED, ["q_proj"], [EMBEDDING, f"{ROOT}lm_head.weight"], id="row27-both-and-tied"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_copy_that_is_the_base_weight_is_dropped(base, targets, copies, dtype, tmp_path):
    config = LoraConfig(target_modules=targets)
    folder = saved(build(base).to(dtype), tmp_path, config, save_embedding_layers=True)
    names = {name for name in load_file(folder / TENSOR_FILE) if ".lora_" not in name}
    assert names == set(copies)
    form = compile_adapter(folder, read_base(tmp_path / "base"))
    assert len(form.members) == 2 + ("lm_head" in targets)
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).eval()
    found = outputs_of(served(model, form), TOKENS)[""]
    expected = outputs_of(PeftModel.from_pretrained(model, folder).eval(), TOKENS)[""]
    assert relative(found, expected) <= 1e-5


@pytest.mark.parametrize("trained", [torch.float32, torch.float16], ids=["row27-to-float32", "row27-to-float16"])
def test_a_copy_in_the_dtype_of_training_is_dropped(trained, tmp_path):
    """The base model is stored in bfloat16, and was trained on in another dtype."""
    folder = saved(build(LLAMA).bfloat16(), tmp_path, LoraConfig(target_modules=["q_proj"]), save_embedding_layers=True)
    rewrite_tensors(folder, lambda tensors: {name: tensor.to(trained) for name, tensor in tensors.items()})
    assert compile_adapter(folder, read_base(tmp_path / "base")).members


@pytest.mark.parametrize("name", [HEAD, f"{ROOT}lm_head.weight", EMBEDDING], ids="row27-row29-{}".format)
def test_a_copy_that_was_trained_is_refused_with_its_size(name, tmp_path):
    targets = ["q_proj", "lm_head"] if name == HEAD else ["q_proj"]
    folder = saved(build(LLAMA), tmp_path, LoraConfig(target_modules=targets), save_embedding_layers=True)

    def train(tensors):
        tensors[name][3:5] *= 1.001
        return tensors

    rewrite_tensors(folder, train)
    refusal = refused(folder, read_base(tmp_path / "base"))
    assert refusal.code is Code.MODULE_UNSUPPORTED
    for words in (name, "5,120 bytes", "2 of its 40 rows differ"):
        assert words in refusal.sentence


@pytest.mark.parametrize(
    ("targets", "bias"), [(["q_proj"], "none"), (["q_proj", "lm_head"], "none"), (["q_proj", "lm_head"], "lora_only")]
)
@pytest.mark.parametrize("change", [0, 1e-3], ids=["row27-its-own", "row27-trained"])
def test_a_bias_of_the_head_is_a_copy_unless_the_config_trains_it(targets, bias, change, tmp_path):
    model = build(hf.PhiConfig(**LLAMA.to_diff_dict() | {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}))
    config = LoraConfig(target_modules=targets, bias=bias)
    folder = saved(model, tmp_path, config, save_embedding_layers=True)
    name = f"{ROOT}lm_head.base_layer.bias" if "lm_head" in targets else f"{ROOT}lm_head.bias"
    rewrite_tensors(folder, lambda tensors: tensors | {name: tensors[name] + change})
    base = read_base(tmp_path / "base")
    if not change or bias != "none":
        head = compile_adapter(folder, base).members.get("lm_head")
        assert (head is not None) == ("lm_head" in targets)
        assert head is None or (head.bias.replaced is not None) == (bias != "none")
        return
    refusal = refused(folder, base)
    assert (refusal.code, name in refusal.sentence) == (Code.MODULE_UNSUPPORTED, True)
    assert "40 of its 40 rows" in refusal.sentence


def test_row27_a_change_below_the_precision_of_the_base_is_a_change(tmp_path):
    folder = saved(build(LLAMA).bfloat16(), tmp_path, LoraConfig(target_modules=["q_proj"]), save_embedding_layers=True)
    rewrite_tensors(folder, lambda tensors: {name: tensor.float() * (1 + 1e-4) for name, tensor in tensors.items()})
    assert "40 of its 40 rows" in refused(folder, read_base(tmp_path / "base")).sentence


def test_row27_a_copy_is_refused_where_there_is_nothing_to_compare_it_with(tmp_path):
    folder = saved(build(LLAMA), tmp_path, LoraConfig(target_modules=["q_proj"]), save_embedding_layers=True)
    refusal = refused(folder, BaseModel.from_config(LLAMA, torch.float32))
    assert refusal.code is Code.MODULE_UNSUPPORTED
    assert "cannot be held against the base model" in refusal.sentence
    (tmp_path / "base" / "model.safetensors").unlink()
    assert "cannot be held against the base model" in refused(folder, read_base(tmp_path / "base")).sentence


def test_row27_headers_alone_decide_by_the_shape(tmp_path):
    folder = saved(build(LLAMA), tmp_path, LoraConfig(target_modules=["q_proj"]), save_embedding_layers=True)
    assert find_form(folder, read_base(tmp_path / "base"), Reasons(), values=False) is not None


def test_row27_a_copy_of_another_projection_is_refused(tmp_path):
    save(tmp_path, toy(torch.float32), LoraConfig(target_modules=["q_proj"]))
    name = f"{ROOT}layers.0.self_attn.q_proj.base_layer.weight"
    rewrite_tensors(tmp_path, lambda tensors: tensors | {name: toy(torch.float32).layers[0].self_attn.q_proj.weight})
    refusal = refused(tmp_path, known(toy(torch.float32)))
    assert (refusal.code, name in refusal.sentence) == (Code.MODULE_UNSUPPORTED, True)


# whole modules


@pytest.mark.parametrize(
    ("modules", "size"),
    [
        pytest.param(["lm_head"], "5,120 bytes", id="row29-head"),
        pytest.param(["embed_tokens", "lm_head"], "10,240 bytes", id="row29-embedding-and-head"),
        pytest.param(["model.norm"], "128 bytes", id="row29-norm"),
    ],
)
def test_modules_to_save_are_refused_with_their_size(modules, size, tmp_path):
    base = build(LLAMA)
    save(tmp_path, base, LoraConfig(target_modules=["q_proj"], modules_to_save=modules))
    reasons = Reasons(collect=True)
    find_form(tmp_path, known(base), reasons)
    assert [reason.code for reason in reasons.found] == [Code.CONFIG_UNSUPPORTED_FIELD]
    for words in ("modules_to_save", size, modules[0]):
        assert words in reasons.found[0].sentence


def test_row30_a_classification_head_is_refused_with_its_size(tmp_path):
    config = hf.LlamaConfig(**LLAMA.to_dict() | {"num_labels": 3})
    model = build(config, hf.AutoModelForSequenceClassification)
    save(tmp_path, model, LoraConfig(target_modules=["q_proj"], task_type="SEQ_CLS"))
    refusal = refused(tmp_path, BaseModel.from_config(LLAMA, torch.float32))
    assert refusal.code is Code.CONFIG_UNSUPPORTED_FIELD
    for words in ("modules_to_save", "score", "[3, 32]", "384 bytes"):
        assert words in refusal.sentence


# vocabularies


def test_row31_a_resized_vocabulary_is_refused_with_both_sizes(tmp_path):
    model = build(LLAMA)
    model.save_pretrained(tmp_path / "base")
    model.resize_token_embeddings(44)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")  # sees by itself that the vocabulary has changed
    (tmp_path / "adapter" / "added_tokens.json").write_text(json.dumps({"<a>": 40}))
    refusal = refused(tmp_path / "adapter", read_base(tmp_path / "base"))
    assert refusal.code is Code.MODULE_UNSUPPORTED
    for words in (EMBEDDING, "[44, 32]", "[40, 32]", "5,632 bytes"):
        assert words in refusal.sentence


def test_row31_a_head_adapted_for_more_tokens_is_refused(tmp_path):
    model = build(LLAMA)
    model.resize_token_embeddings(44)
    save(tmp_path, model, LoraConfig(target_modules=["lm_head"]))
    rewrite_tensors(tmp_path, lambda tensors: {name: t for name, t in tensors.items() if name != HEAD})
    refusal = refused(tmp_path, known(build(LLAMA)))
    assert (refusal.code, "[44, 8]; expected [40, 8]" in refusal.sentence) == (Code.TENSOR_SHAPE, True)


def test_row31_added_tokens_without_new_rows_change_nothing(tmp_path):
    """The rows were there; a tokenizer beside the adapter is not Scute's."""
    base = toy()
    adapted = save(tmp_path, base, LoraConfig(target_modules=["q_proj"]))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<a>": 5}))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert_exact(tmp_path, base, adapted)


def test_row32_a_head_of_any_vocabulary(tmp_path):
    """vLLM's own limit is 258,048 rows. An engine refuses heads, see docs/decisions/0004; the algebra does not."""
    base = toy(torch.float32)
    base.lm_head = torch.nn.Linear(24, 260_000, bias=False)
    form = assert_exact(
        tmp_path, base, save(tmp_path, base, LoraConfig(target_modules=["lm_head"], lora_alpha=80)), 1e-5
    )
    assert form.members["lm_head"].terms[0].b.shape[1] == 260_000


@pytest.mark.parametrize("method", [pytest.param(False, id="row32-LoRA"), pytest.param(True, id="row32-DoRA")])
def test_adapters_of_embeddings_are_refused(method, tmp_path):
    base = build(LLAMA)
    save(tmp_path, base, LoraConfig(target_modules=["q_proj", "embed_tokens"], use_dora=method))
    refusal = refused(tmp_path, known(base))
    assert refusal.code is Code.MODULE_UNSUPPORTED
    assert "embed_tokens" in refusal.sentence
    assert "embedding" in refusal.sentence


# biases, and every reason at once


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"bias": "lora_only"}, id="row33-lora_only"),
        pytest.param({"bias": "all"}, id="row33-all"),
        pytest.param({"lora_bias": True}, id="row33-lora_bias"),
        pytest.param({"bias": "all", "lora_bias": True}, id="row33-both"),
        pytest.param({"bias": "all", "use_dora": True}, id="row33-all-with-DoRA"),
    ],
)
def test_biases_equal_peft(options, tmp_path):
    base = toy()
    config = LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], **options)
    assert_exact(tmp_path, base, save(tmp_path, base, config))


def test_row34_every_reason_is_told_at_once(tmp_path):
    base = build(LLAMA)
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], trainable_token_indices=[2])
    save(tmp_path, base, config)
    rewrite_config(tmp_path, init_lora_weights="pissa", new_field=3, r="four")
    reasons = Reasons(collect=True)
    assert find_form(tmp_path, known(base), reasons) is None
    assert {reason.code for reason in reasons.found} == {
        Code.INIT_CHANGED_BASE,
        Code.CONFIG_UNSUPPORTED_FIELD,
        Code.CONFIG_UNKNOWN_FIELD,
        Code.CONFIG_INVALID,
        Code.MODULE_UNSUPPORTED,
    }
    assert refused(tmp_path, known(base)).sentence == reasons.found[0].sentence

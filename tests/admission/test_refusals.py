"""Every refusal: the right code, and a sentence that names the culprit."""

import json
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import IA3Config, LoraConfig, OFTConfig, VeraConfig
from peft_oracle import Toy, rewrite_config, rewrite_tensors, save, toy

from scute.admission import BaseModel, compile_adapter
from scute.admission.compile import find_form
from scute.admission.description import describe
from scute.admission.reasons import Reasons
from scute.errors import Code, Refusal

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
Q = "base_model.model.layers.0.self_attn.q_proj"
CONFIGS = {
    "lora": lambda: LoraConfig(target_modules=["q_proj", "v_proj"], r=4),
    "lora_bias": lambda: LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_bias=True),
    "lora_only": lambda: LoraConfig(target_modules=["q_proj", "v_proj"], bias="lora_only"),
    "bias_all": lambda: LoraConfig(target_modules=["q_proj"], bias="all"),
    "dora": lambda: LoraConfig(target_modules=["q_proj", "v_proj"], r=4, use_dora=True),
    "ia3": lambda: IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "vera": lambda: VeraConfig(target_modules=["q_proj", "v_proj"], r=4),
    "oft": lambda: OFTConfig(target_modules=["q_proj", "v_proj"], oft_block_size=4),
}


@pytest.fixture(scope="module")
def base():
    return BaseModel.from_module(toy(torch.float32))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One good adapter of every kind, to be copied and spoilt."""
    folder = tmp_path_factory.mktemp("good")
    for kind, config in CONFIGS.items():
        save(folder / kind, toy(torch.float32), config())
    return folder


@pytest.fixture
def copy_of(saved, tmp_path):
    return lambda kind: shutil.copytree(saved / kind, tmp_path / kind)


def refuse(folder, base, code, *culprits):
    with pytest.raises(Refusal) as refusal:
        compile_adapter(folder, base)
    assert refusal.value.code is code, str(refusal.value)
    for culprit in culprits:
        assert culprit in refusal.value.sentence
    assert str(refusal.value).startswith(f"[scute:{code}] ")
    check_collected(folder, base, code, culprits)


def check_collected(folder, base, code, culprits):
    """The first reason that is collected is the one that is raised, from headers too but for values."""
    for values in (True, False) if code is not Code.TENSOR_NOT_FINITE else (True,):
        reasons = Reasons(collect=True)
        assert find_form(folder, base, reasons, values=values) is None
        assert reasons.found[0].code is code
        told = " ".join(reason.sentence for reason in reasons.found)
        assert [culprit for culprit in culprits if culprit.partition(" and ")[0] not in told] == []


def test_every_reason_is_collected(copy_of, base):
    """Independent ones, each once, and nothing that merely follows from another."""
    folder = copy_of("dora")
    rewrite_config(folder, use_qalora=True, modules_to_save=["lm_head"], new_thing=1)
    rewrite_tensors(
        folder,
        lambda tensors: (
            {name.replace("layers.1.self_attn.q", "layers.9.self_attn.q"): t for name, t in tensors.items()}
            | {f"{Q}.extra": torch.ones(1), f"{Q}.other": torch.ones(1)}
            | {A: torch.ones(3, 24), MAGNITUDE: torch.ones(2)}
        ),
    )
    reasons = Reasons(collect=True)
    assert find_form(folder, base, reasons, values=False) is None
    assert [str(reason.code) for reason in reasons.found] == [
        *["config.unsupported_field"] * 2,
        "config.unknown_field",
        *["tensor.no_module"] * 3,
        *["tensor.shape"] * 2,
        *["tensor.left_over"] * 2,
    ]


SENTENCES = [
    ("lora", {"r": ...}, "field r: it is missing. Save the adapter with PEFT."),
    ("lora", {"r": "four"}, "field r: found 'four'; expected a valid integer."),
    ("lora", {"r": 0}, "field r: found 0; expected greater than 0."),
    ("lora", {"target_modules": [1]}, "field target_modules: found 1; expected a valid string."),
    ("lora", {"target_modules": 1}, "field target_modules: found 1; expected a valid string or a valid list."),
    ("lora", {"init_lora_weights": [1]}, "init_lora_weights: found [1]; expected a valid boolean or a valid string."),
    ("lora", {"bias": "some"}, "field bias: found 'some'; expected 'none', 'all' or 'lora_only'."),
    ("lora", {"rank_pattern": {"v": 2, "q": "4"}}, "rank_pattern: found '4' at 'q'; expected a valid integer."),
    ("lora", {"rank_pattern": {"(": 4}}, "field rank_pattern: '(': it is not a regular expression (missing )"),
    (
        "lora",
        {"target_modules": "a" * 10**5},
        "target_modules: 'aaaaaaaaaaaaaaaaaaaaaaaaaaa...aaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    ),
    ("lora", {"layers_to_transform": [0], "target_modules": "q"}, "field layers_to_transform: it needs target_modules"),
    ("oft", {"peft_version": "new"}, "field peft_version: found 'new'; expected a version"),
]


@pytest.mark.parametrize(("kind", "fields", "sentence"), SENTENCES)
def test_what_is_found_and_what_is_expected(kind, fields, sentence, copy_of, base):
    folder = copy_of(kind)
    rewrite_config(folder, **fields)
    refuse(folder, base, Code.CONFIG_INVALID, sentence)


@pytest.mark.parametrize("field", ["target_modules", "init_lora_weights", "peft_type", "new_thing"])
def test_what_is_found_is_shortened(field, copy_of, base):
    folder = copy_of("lora")
    rewrite_config(folder, **{field: "x" * 5000})
    with pytest.raises(Refusal) as refusal:
        compile_adapter(folder, base)
    assert len(refusal.value.sentence) < 400


def test_every_wrong_field_is_collected(copy_of, base):
    folder = copy_of("lora")
    rewrite_config(folder, r="four", lora_alpha=None, bias="some")
    reasons = Reasons(collect=True)
    find_form(folder, base, reasons)
    assert [reason.sentence.split()[2] for reason in reasons.found] == ["r:", "lora_alpha:", "bias:"]


def test_headers_give_the_form_without_values(copy_of, base):
    for kind in CONFIGS:
        form = find_form(folder := copy_of(kind), base, Reasons(collect=True), values=False)
        assert describe(form) == describe(compile_adapter(folder, base))


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_good_ones_are_admitted(kind, copy_of, base):
    assert compile_adapter(copy_of(kind), base).members


# the folder


def test_missing_folder(tmp_path, base):
    refuse(tmp_path / "nowhere", base, Code.FOLDER_MISSING, "nowhere", CONFIG)


def test_folder_name_that_the_system_rejects(tmp_path, base):
    refuse(tmp_path / ("x" * 5000), base, Code.FOLDER_UNREADABLE, "too long")


def test_file_in_place_of_the_folder(tmp_path, base):
    (tmp_path / "file").write_text("")
    refuse(tmp_path / "file", base, Code.FOLDER_MISSING, "file")


def test_a_file_of_the_folder_in_place_of_it(copy_of, base):
    folder = copy_of("lora")
    refuse(folder / CONFIG, base, Code.FOLDER_MISSING, f"'{CONFIG}' is a file", "Give the folder")


@pytest.mark.parametrize("name", [CONFIG, TENSORS])
def test_a_link_to_nothing(name, copy_of, base):
    folder = copy_of("lora")
    (folder / name).unlink()
    (folder / name).symlink_to("nowhere")
    refuse(folder, base, Code.FOLDER_INCOMPLETE, f"{name} in the folder 'lora' is a link to a file that is not there")


def test_a_path_without_a_last_part(base):
    refuse(Path("/"), base, Code.FOLDER_INCOMPLETE, f"the folder '/' has no {CONFIG}")


def test_empty_folder(tmp_path, base):
    refuse(tmp_path, base, Code.FOLDER_INCOMPLETE, CONFIG)


@pytest.mark.parametrize("name", [CONFIG, TENSORS])
def test_missing_file(name, copy_of, base):
    folder = copy_of("lora")
    (folder / name).unlink()
    refuse(folder, base, Code.FOLDER_INCOMPLETE, name)


@pytest.mark.parametrize("name", [CONFIG, TENSORS])
def test_folder_in_place_of_a_file(name, copy_of, base):
    folder = copy_of("lora")
    (folder / name).unlink()
    (folder / name).mkdir()
    refuse(folder, base, Code.FOLDER_UNREADABLE, name)


@pytest.mark.parametrize("text", ["", "{", "[]", '"LORA"', "null", "[" * 100_000], ids=range(6))
def test_config_that_is_no_json_object(text, copy_of, base):
    folder = copy_of("lora")
    (folder / CONFIG).write_text(text)
    refuse(folder, base, Code.FOLDER_UNREADABLE, CONFIG)


def test_config_that_is_no_text(copy_of, base):
    folder = copy_of("lora")
    (folder / CONFIG).write_bytes(b"\xff\xfe{}")
    refuse(folder, base, Code.FOLDER_UNREADABLE, CONFIG)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_cut_off_tensors(keep, copy_of, base):
    path = copy_of("lora") / TENSORS
    path.write_bytes(path.read_bytes()[:keep])
    refuse(path.parent, base, Code.FOLDER_UNREADABLE, TENSORS)


def test_tensors_that_are_no_safetensors(copy_of, base):
    folder = copy_of("lora")
    (folder / TENSORS).write_bytes(bytes(range(256)) * 8)
    refuse(folder, base, Code.FOLDER_UNREADABLE, TENSORS)


def test_pickle_alone_is_not_read(copy_of, base):
    folder = copy_of("lora")
    (folder / TENSORS).rename(folder / "adapter_model.bin")
    refuse(folder, base, Code.FOLDER_PICKLE, "adapter_model.bin", "save_pretrained")


def test_pickle_beside_safetensors_is_ignored(copy_of, base):
    folder = copy_of("lora")
    (folder / "adapter_model.bin").write_bytes(pickle.dumps({"anything": 1}))
    assert compile_adapter(folder, base).members


# the config: (kind, fields, code, what the sentence names)

BAD_CONFIGS = [
    ("lora", {"peft_type": ...}, Code.CONFIG_INVALID, "peft_type"),
    ("lora", {"peft_type": 3}, Code.CONFIG_INVALID, "peft_type"),
    ("lora", {"peft_type": "BOFT"}, Code.METHOD_UNSUPPORTED, "BOFT"),
    ("lora", {"peft_type": "LOHA"}, Code.METHOD_UNSUPPORTED, "VeRA (VERA)"),
    ("lora", {"peft_type": "lora"}, Code.METHOD_UNSUPPORTED, "lora"),
    *[("lora", {"r": r}, Code.CONFIG_INVALID, "field r") for r in ("abc", "4", None, 0, -4, 4.5, True, ..., [4])],
    *[
        ("lora", {"lora_alpha": alpha}, Code.CONFIG_INVALID, "lora_alpha")
        for alpha in (None, "8", True, float("nan"), float("inf"), 10**400, ...)
    ],
    ("lora", {"target_modules": ...}, Code.CONFIG_INVALID, "target_modules"),
    ("lora", {"target_modules": None}, Code.CONFIG_INVALID, "target_modules"),
    ("lora", {"target_modules": [1]}, Code.CONFIG_INVALID, "target_modules"),
    ("lora", {"target_modules": "(q_proj"}, Code.CONFIG_INVALID, "target_modules"),
    ("lora", {"exclude_modules": "*"}, Code.CONFIG_INVALID, "exclude_modules"),
    ("lora", {"layers_to_transform": ["0"]}, Code.CONFIG_INVALID, "layers_to_transform"),
    ("lora", {"layers_to_transform": True}, Code.CONFIG_INVALID, "layers_to_transform"),
    ("lora", {"layers_pattern": ["("], "layers_to_transform": [0]}, Code.CONFIG_INVALID, "layers_pattern"),
    ("lora", {"target_modules": "a{99999999999}"}, Code.CONFIG_INVALID, "target_modules"),
    ("lora", {"rank_pattern": {"(?i)Q_proj": 4}}, Code.CONFIG_INVALID, "rank_pattern"),
    ("lora", {"layers_pattern": "(?P<idx>l)", "layers_to_transform": [0]}, Code.CONFIG_INVALID, "layers_pattern"),
    ("lora", {"rank_pattern": {"q_proj": "4"}}, Code.CONFIG_INVALID, "rank_pattern"),
    ("lora", {"rank_pattern": {"q_proj": -4}}, Code.CONFIG_INVALID, "rank_pattern"),
    ("lora", {"rank_pattern": {"(": 4}}, Code.CONFIG_INVALID, "rank_pattern"),
    ("lora", {"alpha_pattern": {"q_proj": None}}, Code.CONFIG_INVALID, "alpha_pattern"),
    ("lora", {"alpha_pattern": [3]}, Code.CONFIG_INVALID, "alpha_pattern"),
    ("lora", {"use_rslora": "yes"}, Code.CONFIG_INVALID, "use_rslora"),
    ("lora", {"use_dora": "yes"}, Code.CONFIG_INVALID, "use_dora"),
    ("lora", {"bias": "some"}, Code.CONFIG_INVALID, "bias"),
    ("lora", {"bias": "vera_only"}, Code.CONFIG_INVALID, "bias"),
    ("lora", {"init_lora_weights": "zeros"}, Code.CONFIG_INVALID, "zeros"),
    ("lora", {"init_lora_weights": 3}, Code.CONFIG_INVALID, "init_lora_weights"),
    ("lora", {"use_new_thing": True}, Code.CONFIG_UNKNOWN_FIELD, "use_new_thing"),
    ("dora", {"new_thing_config": {"a": 1}}, Code.CONFIG_UNKNOWN_FIELD, "new_thing_config"),
    ("ia3", {"layers_to_transform": [0]}, Code.CONFIG_UNKNOWN_FIELD, "layers_to_transform"),
    *[
        ("lora", {"init_lora_weights": init}, Code.INIT_CHANGED_BASE, init)
        for init in ("pissa", "pissa_niter_16", "olora", "corda", "lora_ga", "loftq")
    ],
    ("dora", {"init_lora_weights": "pissa"}, Code.INIT_CHANGED_BASE, "path_initial_model_for_weight_conversion"),
    *[
        ("lora", {name: value}, Code.CONFIG_UNSUPPORTED_FIELD, name)
        for name, value in {
            "modules_to_save": ["lm_head"],
            "trainable_token_indices": [1],
            "layer_replication": [[0, 2]],
            "target_parameters": ["experts.w"],
            "alora_invocation_tokens": [1, 2],
            "use_qalora": True,
            "use_bdlora": {"nblocks": 2},
            "arrow_config": {"top_k": 3},
            "kasa_config": {},
            "velora_config": {},
            "monteclora_config": {"num_samples": 8},
        }.items()
    ],
    ("dora", {"lora_bias": True}, Code.CONFIG_UNSUPPORTED_FIELD, "lora_bias"),
    *[(kind, {"modules_to_save": ["x"]}, Code.CONFIG_UNSUPPORTED_FIELD, "modules_to_save") for kind in CONFIGS],
    ("ia3", {"feedforward_modules": [1]}, Code.CONFIG_INVALID, "feedforward_modules"),
    ("ia3", {"feedforward_modules": ["q_proj"]}, Code.CONFIG_MISMATCH, f"{Q}.ia3_l"),
    ("ia3", {"feedforward_modules": []}, Code.CONFIG_MISMATCH, "down_proj.ia3_l"),
    ("vera", {"exclude_modules": ["v_proj"]}, Code.CONFIG_UNKNOWN_FIELD, "exclude_modules"),
    ("vera", {"r": ...}, Code.CONFIG_INVALID, "field r"),
    ("vera", {"save_projection": ...}, Code.CONFIG_INVALID, "save_projection"),
    ("vera", {"projection_prng_key": 1.5}, Code.CONFIG_INVALID, "projection_prng_key"),
    ("vera", {"save_projection": False}, Code.TENSOR_LEFT_OVER, "base_model.vera_A"),
    ("oft", {"oft_block_size": ...}, Code.METHOD_OLD_FORMAT, "oft_block_size"),
    ("oft", {"use_cayley_neumann": ...}, Code.METHOD_OLD_FORMAT, "use_cayley_neumann"),
    ("oft", {"num_cayley_neumann_terms": -5}, Code.CONFIG_INVALID, "num_cayley_neumann_terms"),
    ("oft", {"num_cayley_neumann_terms": 10**9}, Code.CONFIG_INVALID, "num_cayley_neumann_terms"),
    ("vera", {"projection_prng_key": 2**64}, Code.CONFIG_INVALID, "projection_prng_key"),
    ("oft", {"num_cayley_neumann_terms": 2.5}, Code.CONFIG_INVALID, "num_cayley_neumann_terms"),
    ("oft", {"eps": -1.0}, Code.CONFIG_INVALID, "eps"),
    ("oft", {"coft": None}, Code.CONFIG_INVALID, "coft"),
    ("oft", {"peft_version": "new"}, Code.CONFIG_INVALID, "peft_version"),
    ("oft", {"peft_version": 0.21}, Code.CONFIG_INVALID, "peft_version"),
    ("oft", {"block_share": True}, Code.TENSOR_SHAPE, f"{Q}.oft_R.weight"),
    # the config against the file
    ("lora", {"target_modules": ["nowhere"]}, Code.CONFIG_MISMATCH, "nowhere"),
    ("lora", {"target_modules": []}, Code.CONFIG_MISMATCH, "target_modules"),
    ("lora", {"target_modules": ["q_proj"]}, Code.CONFIG_MISMATCH, "layers.0.self_attn.v_proj"),
    ("lora", {"target_modules": ["q_proj", "v_proj", "o_proj"]}, Code.TENSOR_MISSING, "layers.0.self_attn.o_proj"),
    ("lora", {"exclude_modules": ["v_proj"]}, Code.CONFIG_MISMATCH, "layers.0.self_attn.v_proj"),
    ("lora", {"layers_to_transform": [0], "layers_pattern": "layers"}, Code.CONFIG_MISMATCH, "layers.1"),
    ("lora", {"layers_to_transform": [9]}, Code.CONFIG_MISMATCH, "target_modules"),
    ("lora", {"target_modules": ["q_proj", "v_proj", "embed_tokens"]}, Code.MODULE_UNSUPPORTED, "embed_tokens"),
    ("lora", {"rank_pattern": {"q_proj": 2}}, Code.TENSOR_SHAPE, f"{Q}.lora_A.weight"),
    ("lora", {"r": 8}, Code.TENSOR_SHAPE, "[8, 24]"),
    ("lora", {"use_dora": True}, Code.TENSOR_MISSING, "lora_magnitude_vector"),
    ("lora", {"lora_bias": True}, Code.TENSOR_MISSING, f"{Q}.lora_B.bias"),
    ("lora", {"bias": "lora_only"}, Code.TENSOR_MISSING, "PEFT before 0.21"),
    ("lora", {"bias": "all"}, Code.TENSOR_MISSING, f"{Q}.base_layer.bias"),
    ("lora_bias", {"lora_bias": False}, Code.TENSOR_LEFT_OVER, f"{Q}.lora_B.bias"),
    ("lora_only", {"bias": "none"}, Code.TENSOR_LEFT_OVER, f"{Q}.base_layer.bias"),
    ("bias_all", {"bias": "lora_only"}, Code.TENSOR_LEFT_OVER, "o_proj.bias"),
    ("dora", {"use_dora": False}, Code.TENSOR_LEFT_OVER, "lora_magnitude_vector"),
    ("vera", {"r": 8}, Code.TENSOR_SHAPE, "vera_lambda_d"),
]


def label(value):
    return re.sub(r"\W+", "_", json.dumps(value, default=str))[:60] if isinstance(value, dict) else None


@pytest.mark.parametrize(("kind", "fields", "code", "culprit"), BAD_CONFIGS, ids=label)
def test_config(kind, fields, code, culprit, copy_of, base):
    folder = copy_of(kind)
    rewrite_config(folder, **fields)
    refuse(folder, base, code, culprit)


HARMLESS = [
    ("lora", {"init_lora_weights": init}) for init in (True, False, None, "gaussian", "eva", "orthogonal", "mica")
] + [
    ("lora", {"lora_dropout": 0.5, "fan_in_fan_out": True, "inference_mode": False, "task_type": "CAUSAL_LM"}),
    ("lora", {"loftq_config": {"loftq_bits": 4}, "eva_config": {"rho": 2.0}, "corda_config": {}, "runtime_config": {}}),
    ("lora", {"lora_ga_config": {"scale": "stable"}, "megatron_config": {"a": 1}, "ensure_weight_tying": True}),
    ("lora", {"kasa_config": None, "use_qalora": False, "alora_invocation_tokens": None, "modules_to_save": []}),
    ("lora", {"something_new": None, "another": False, "third": 0, "fourth": []}),
    ("lora", {"rank_pattern": None, "alpha_pattern": None, "use_rslora": ..., "lora_bias": ..., "bias": ...}),
    ("lora", {"target_modules": ["q_proj", "v_proj", "nowhere"]}),
    ("lora", {"layers_to_transform": []}),
    ("vera", {"vera_dropout": 0.3, "d_initial": 1.0}),
    ("oft", {"module_dropout": 0.3, "init_weights": False}),
    ("ia3", {"init_ia3_weights": False}),
]


@pytest.mark.parametrize(("kind", "fields"), HARMLESS, ids=label)
def test_fields_without_effect(kind, fields, copy_of, base):
    folder = copy_of(kind)
    expected = compile_adapter(folder, base)
    rewrite_config(folder, **fields)
    assert list(compile_adapter(folder, base).members) == list(expected.members)


# the tensors: (kind, change to the dictionary, code, what the sentence names)


def renamed(old, new):
    return lambda tensors: {name.replace(old, new): t for name, t in tensors.items()}


def without(part):
    return lambda tensors: {name: t for name, t in tensors.items() if part not in name}


def with_one(name, change):
    """Change one tensor, or add it if it is not there."""
    return lambda tensors: tensors | {name: change(tensors.get(name, torch.ones(2, 2)))}


def spoilt(value):
    def change(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[3] = value
        return tensor

    return change


A, B, MAGNITUDE = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight", f"{Q}.lora_magnitude_vector"
BAD_TENSORS = [
    ("lora", lambda _: {}, Code.TENSOR_MISSING, "layers.0.self_attn.q_proj"),
    ("lora", without(A), Code.TENSOR_MISSING, A),
    ("lora", without(B), Code.TENSOR_MISSING, B),
    ("lora", without("layers.1.self_attn.v_proj"), Code.TENSOR_MISSING, "layers.1.self_attn.v_proj"),
    ("dora", without(MAGNITUDE), Code.TENSOR_MISSING, MAGNITUDE),
    ("vera", without("vera_B"), Code.TENSOR_MISSING, "base_model.vera_B"),
    ("vera", without(f"{Q}.vera_lambda_d"), Code.TENSOR_MISSING, f"{Q}.vera_lambda_d"),
    ("bias_all", without("mlp.down_proj.bias"), Code.TENSOR_MISSING, "mlp.down_proj.bias"),
    ("lora", renamed("base_model.model.", ""), Code.TENSOR_PREFIX, f"expected {A[:-7]}"),
    ("lora", renamed("base_model.model.", "module.base_model.model."), Code.TENSOR_PREFIX, f"expected {A[:-7]}"),
    ("lora", renamed("base_model.model.", "base_model.model._orig_mod."), Code.TENSOR_PREFIX, f"expected {A[:-7]}"),
    ("lora", renamed("base_model.model.", "_orig_mod.base_model.model."), Code.TENSOR_PREFIX, "_orig_mod"),
    ("lora", renamed(".weight", ".default.weight"), Code.TENSOR_PREFIX, f"expected {Q}.lora_"),
    ("ia3", renamed("ia3_l", "ia3_l.default"), Code.TENSOR_PREFIX, "ia3_l.default"),
    ("lora", renamed("layers.1.", "layers.7."), Code.TENSOR_NO_MODULE, "Nearest: layers.1.self_attn"),
    ("lora", renamed("base_model.model.", "base_model.model.model."), Code.TENSOR_NO_MODULE, "model.layers.0"),
    ("lora", renamed("self_attn.q_proj", "norm"), Code.TENSOR_NO_MODULE, "layers.0.norm"),
    ("lora", renamed("layers.0.self_attn.q_proj", "embed_tokens"), Code.MODULE_UNSUPPORTED, "embed_tokens"),
    ("lora", renamed("self_attn", "experts"), Code.MODULE_UNSUPPORTED, "layers.0.experts.q_proj"),
    ("lora", with_one("base_model.model.embed_tokens.lora_embedding_A", torch.clone), Code.MODULE_UNSUPPORTED, "_A"),
    ("lora", with_one("base_model.model.lm_head.base_layer.weight", torch.clone), Code.MODULE_UNSUPPORTED, "lm_head"),
    ("lora", with_one(f"{Q}.lora_C.weight", torch.clone), Code.TENSOR_LEFT_OVER, "lora_C"),
    ("lora", with_one(f"{Q}.weight", torch.clone), Code.TENSOR_LEFT_OVER, f"{Q}.weight"),
    ("lora", with_one(f"{Q}.bias", torch.clone), Code.TENSOR_LEFT_OVER, f"{Q}.bias"),
    ("bias_all", with_one(f"{Q}.bias", torch.clone), Code.TENSOR_LEFT_OVER, f"{Q}.bias"),
    ("lora", with_one(A, lambda t: t.T), Code.TENSOR_SHAPE, A),
    ("lora", with_one(A, lambda t: t[:3]), Code.TENSOR_SHAPE, "[3, 24]; expected [4, 24]"),
    ("lora", with_one(A, lambda t: t.flatten()), Code.TENSOR_SHAPE, "[96]"),
    ("lora", with_one(A, lambda t: t[:0]), Code.TENSOR_SHAPE, A),
    ("lora", with_one(B, lambda t: t[1:]), Code.TENSOR_SHAPE, B),
    ("lora_bias", with_one(f"{Q}.lora_B.bias", lambda t: t[1:]), Code.TENSOR_SHAPE, f"{Q}.lora_B.bias"),
    ("lora_only", with_one(f"{Q}.base_layer.bias", lambda t: t[None]), Code.TENSOR_SHAPE, f"{Q}.base_layer.bias"),
    ("bias_all", renamed("layers.1.mlp.down_proj.bias", "layers.1.mlp.x.bias"), Code.TENSOR_MISSING, "down_proj.bias"),
    ("dora", with_one(MAGNITUDE, lambda t: t[:5]), Code.TENSOR_SHAPE, MAGNITUDE),
    ("dora", with_one(f"{MAGNITUDE}.weight", lambda _: torch.ones(36)), Code.TENSOR_LEFT_OVER, f"{MAGNITUDE}.weight"),
    ("ia3", with_one(f"{Q}.ia3_l", lambda t: t[:7]), Code.TENSOR_SHAPE, f"{Q}.ia3_l"),
    ("vera", with_one("base_model.vera_A", lambda t: t[:, :9]), Code.TENSOR_SHAPE, "base_model.vera_A"),
    ("vera", with_one("base_model.vera_B", lambda t: t[:9]), Code.TENSOR_SHAPE, "base_model.vera_B"),
    ("vera", with_one(f"{Q}.vera_lambda_b", lambda t: t[:9]), Code.TENSOR_SHAPE, f"{Q}.vera_lambda_b"),
    ("oft", with_one(f"{Q}.oft_R.weight", lambda t: t[0]), Code.TENSOR_SHAPE, "[6];"),
    ("oft", with_one(f"{Q}.oft_R.weight", lambda t: t[:5]), Code.TENSOR_SHAPE, f"{Q}.oft_R.weight"),
    ("oft", with_one(f"{Q}.oft_R.weight", lambda t: t[:, :5]), Code.TENSOR_SHAPE, f"{Q}.oft_R.weight"),
    ("oft", with_one(f"{Q}.oft_R.weight", lambda _: torch.ones(4, 10)), Code.TENSOR_SHAPE, f"{Q}.oft_R.weight"),
    ("oft", renamed("oft_R.weight", "oft_r"), Code.METHOD_OLD_FORMAT, "oft_r"),
    *[
        (kind, with_one(name, lambda t: t.to(torch.int32)), Code.TENSOR_DTYPE, name)
        for kind, name in [("lora", A), ("oft", f"{Q}.oft_R.weight"), ("vera", "base_model.vera_A")]
    ],
    ("lora", with_one(B, lambda t: t.to(torch.float8_e4m3fn)), Code.TENSOR_DTYPE, "float8_e4m3fn"),
    *[("lora", with_one(A, spoilt(v)), Code.TENSOR_NOT_FINITE, A) for v in (float("nan"), float("inf"))],
    ("ia3", with_one(f"{Q}.ia3_l", spoilt(-float("inf"))), Code.TENSOR_NOT_FINITE, f"{Q}.ia3_l"),
    ("vera", with_one("base_model.vera_B", spoilt(float("nan"))), Code.TENSOR_NOT_FINITE, "base_model.vera_B"),
]


@pytest.mark.parametrize(("kind", "change", "code", "culprit"), BAD_TENSORS)
def test_tensors(kind, change, code, culprit, copy_of, base):
    folder = copy_of(kind)
    rewrite_tensors(folder, change)
    refuse(folder, base, code, culprit)


def test_left_overs_are_counted(copy_of, base):
    folder = copy_of("lora")
    rewrite_tensors(folder, lambda tensors: tensors | {f"{Q}.extra{i}": torch.ones(1) for i in range(5)})
    refuse(folder, base, Code.TENSOR_LEFT_OVER, f"{Q}.extra2 and 2 more")


def test_both_spellings_of_the_magnitude(copy_of, base):
    folder = copy_of("dora")
    before = compile_adapter(folder, base).members["layers.0.self_attn.q_proj"].magnitude
    rewrite_tensors(folder, renamed("lora_magnitude_vector", "lora_magnitude_vector.weight"))
    assert torch.equal(compile_adapter(folder, base).members["layers.0.self_attn.q_proj"].magnitude, before)


def test_norm_bias(tmp_path):
    base = toy(norm=torch.nn.LayerNorm)
    save(tmp_path, base, LoraConfig(target_modules=["q_proj"], bias="all"))
    refuse(tmp_path, BaseModel.from_module(base), Code.MODULE_UNSUPPORTED, "layers.0.norm.bias")


def test_bias_of_an_unbiased_projection(copy_of, base):
    folder = copy_of("lora_only")
    name = "base_model.model.layers.0.self_attn.v_proj.base_layer.bias"
    rewrite_tensors(folder, lambda tensors: tensors | {name: torch.ones(10)})
    refuse(folder, base, Code.TENSOR_LEFT_OVER, name)


def test_refusal_survives_pickling():
    refusal = pickle.loads(pickle.dumps(Refusal(Code.TENSOR_SHAPE, "x has shape [1].")))
    assert (refusal.code, str(refusal)) == (Code.TENSOR_SHAPE, "[scute:tensor.shape] x has shape [1].")


def test_toy_has_what_these_tests_rely_on():
    assert Toy().layers[0].self_attn.v_proj.bias is None

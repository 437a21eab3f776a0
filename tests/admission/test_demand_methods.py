"""Methods and ranks: sections 2.1 and 2.2 of the demand list. Every id starts with the rows of docs/demand.md."""

import pytest
import torch
from peft import (
    BOFTConfig,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    RoadConfig,
    TrainableTokensConfig,
    VeraConfig,
    get_peft_model,
)
from peft.utils.peft_types import PeftType
from peft_oracle import assert_exact, rewrite_config, rewrite_tensors, save, toy
from tiny_bases import LLAMA, TOKENS, build, known

from scute.admission import BaseModel, compile_adapter
from scute.admission.methods.registry import METHODS
from scute.errors import Code, Refusal

ALL = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SERVED = {method.peft_type for method in METHODS}


@pytest.fixture(scope="module")
def llama():
    return build(LLAMA)


def refused(folder, base) -> Refusal:
    with pytest.raises(Refusal) as refusal:
        compile_adapter(folder, base)
    return refusal.value


# methods


@pytest.mark.parametrize("peft_type", sorted({kind.value for kind in PeftType} - SERVED))
def test_row19_every_other_method_is_refused_by_its_name(peft_type, tmp_path):
    save(tmp_path, toy(torch.float32), LoraConfig(target_modules=["q_proj"]))
    rewrite_config(tmp_path, peft_type=peft_type)
    refusal = refused(tmp_path, BaseModel.from_module(toy(torch.float32)))
    assert refusal.code is Code.METHOD_UNSUPPORTED
    assert f"peft_type = {peft_type!r} is not served" in refusal.sentence


@pytest.mark.parametrize(
    ("config", "culprit"),
    [
        pytest.param(LNTuningConfig(target_modules=["input_layernorm"]), "it trains norms", id="row10-norms"),
        pytest.param(LoHaConfig(target_modules=["q_proj"]), "LOHA", id="row14-LoHa"),
        pytest.param(LoKrConfig(target_modules=["q_proj"]), "LOKR", id="row14-LoKr"),
        pytest.param(RoadConfig(target_modules=["q_proj"], group_size=8), "mixes pairs of outputs", id="row15-RoAd"),
        pytest.param(BOFTConfig(target_modules=["q_proj"], boft_block_size=4), "BOFT", id="row19-BOFT"),
        pytest.param(
            PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "changes no projection", id="row16-prompt"
        ),
        pytest.param(
            PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "changes no projection", id="row16-prefix"
        ),
        pytest.param(TrainableTokensConfig(token_indices=[1, 2]), "rows of the embedding", id="row18-trainable-tokens"),
    ],
)
def test_folders_of_other_methods_are_refused(config, culprit, llama, tmp_path):
    get_peft_model(build(LLAMA), config).save_pretrained(tmp_path)
    refusal = refused(tmp_path, known(llama))
    assert refusal.code is Code.METHOD_UNSUPPORTED
    assert culprit in refusal.sentence


@pytest.mark.parametrize(
    ("config", "field"),
    [
        pytest.param(
            LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[3, 4], task_type="CAUSAL_LM"),
            "alora_invocation_tokens",
            id="row17-activated",
        ),
        pytest.param(
            LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 5]),
            "trainable_token_indices",
            id="row18-token-rows",
        ),
    ],
)
def test_kinds_of_lora_that_no_projection_holds_are_refused(config, field, llama, tmp_path):
    save(tmp_path, llama, config)
    refusal = refused(tmp_path, known(llama))
    assert refusal.code is Code.CONFIG_UNSUPPORTED_FIELD
    assert f"field {field}" in refusal.sentence


def test_row18_trained_rows_are_refused_without_the_field_too(llama, tmp_path):
    save(tmp_path, llama, LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 5]))
    rewrite_config(tmp_path, trainable_token_indices=None)
    refusal = refused(tmp_path, known(llama))
    assert refusal.code is Code.MODULE_UNSUPPORTED
    assert "trainable_tokens_delta" in refusal.sentence


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("lora_magnitude_vector", "dora_scale", id="row7-in-place-of-the-magnitude"),
        pytest.param(
            "base_model.model.layers.0.self_attn.o_proj.lora_magnitude_vector",
            "lycoris_layers_0_self_attn_o_proj.dora_scale",
            id="row7-names-of-LyCORIS",
        ),
    ],
)
@pytest.mark.parametrize("targets", [["o_proj"], ["out"]], ids=["oblong", "square"])
def test_magnitudes_of_lycoris_are_never_guessed(old, new, targets, tmp_path):
    base = Square().double() if targets == ["out"] else toy()
    save(tmp_path, base, LoraConfig(target_modules=targets, use_dora=True))
    old, new = (name.replace("layers.0.self_attn.o_proj", "out") if targets == ["out"] else name for name in (old, new))
    rewrite_tensors(tmp_path, lambda tensors: {name.replace(old, new): t for name, t in tensors.items()})
    refusal = refused(tmp_path, BaseModel.from_module(base))
    assert refusal.code is Code.METHOD_UNSUPPORTED
    assert "dora_scale" in refusal.sentence


class Square(torch.nn.Module):
    """One projection whose magnitude fits both of its sides."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(24, 24)

    def forward(self, x):
        return self.out(x)


@pytest.mark.parametrize("suffix", [pytest.param("", id="row2-as-saved"), pytest.param(".weight", id="row2-in-memory")])
def test_both_names_of_the_magnitude(suffix, tmp_path):
    base = toy()
    adapted = save(tmp_path, base, LoraConfig(target_modules=ALL, use_dora=True))
    rewrite_tensors(
        tmp_path,
        lambda tensors: {n + suffix if n.endswith("magnitude_vector") else n: t for n, t in tensors.items()},
    )
    assert_exact(tmp_path, base, adapted)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(LoraConfig(target_modules=ALL, use_dora=True), id="row1-row3-DoRA"),
        pytest.param(
            IA3Config(target_modules=["q_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
            id="row9-row10-IA3",
        ),
        pytest.param(VeraConfig(target_modules=ALL, r=6), id="row10-row12-VeRA-of-six-sizes"),
        pytest.param(
            VeraConfig(target_modules=ALL, r=6, save_projection=False), id="row11-row12-VeRA-without-its-pair"
        ),
    ],
)
def test_methods_beside_lora_equal_peft(config, tmp_path):
    base = toy()
    assert_exact(tmp_path, base, save(tmp_path, base, config, spread=0.5))


# ranks


@pytest.mark.parametrize("rank", [1, 3, 5, 48, 65, 300], ids="row21-row23-row25-rank{}".format)
@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_any_integer_is_a_rank(rank, dora, tmp_path):
    """Of a Llama, whose q, k and v an engine fuses; there is no field for the largest rank."""
    base = build(LLAMA)
    config = LoraConfig(target_modules="all-linear", r=rank, lora_alpha=rank, use_dora=dora)
    adapted = save(tmp_path, base, config, spread=0.3 / rank**0.25)
    form = assert_exact(tmp_path, base, adapted, tolerance=1e-5, x=TOKENS)
    assert {member.rank for member in form.members.values()} == {rank}

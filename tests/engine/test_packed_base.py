"""A base model whose files hold packed projections, and folders with more in them than the adapter, in one batch."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import World, disagreement, serve_by_name
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import Phi3Config, Phi3ForCausalLM

from scute.engine.offline import Row
from scute.testing.adapters import AMPLIFIED, write_adapter
from scute.testing.oracle import Oracle
from scute.testing.tiny import SHAPE, write_model

pytestmark = pytest.mark.engine

BOUND = 1e-4
PACKED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
RECIPES = {
    "row42-LoRA": replace(AMPLIFIED["lora-r8"], targets=PACKED),
    "row42-AdaLoRA": replace(AMPLIFIED["adalora"], targets=PACKED),
    "row42-DoRA": replace(AMPLIFIED["dora"], targets=PACKED),
    "row42-IA3": replace(AMPLIFIED["ia3"], targets=("qkv_proj", "down_proj")),
    "row42-VeRA": replace(AMPLIFIED["vera"], targets=PACKED),
    "row42-OFT": replace(AMPLIFIED["oft"], targets=PACKED),
}
COPIES, WRAPPED = "row27-row28-copies-of-base-weights", "row36-names-of-a-wrapper"


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> World:
    root = tmp_path_factory.mktemp("packed")
    base = write_model(Phi3ForCausalLM(Phi3Config(**SHAPE, pad_token_id=0)), root / "base")
    oracle = Oracle(base)
    folders = {name: write_adapter(oracle.base, recipe, root / name) for name, recipe in RECIPES.items()}
    folders[COPIES] = write_with_copies(oracle, root / COPIES)
    return World(base, oracle, {name: str(folder) for name, folder in folders.items()})


def write_with_copies(oracle: Oracle, folder: Path) -> Path:
    """An adapter beside which PEFT has saved the embedding and the head, which nobody trained."""
    torch.manual_seed(0)
    config = LoraConfig(target_modules=["qkv_proj"], r=5, init_lora_weights=False)
    get_peft_model(copy.deepcopy(oracle.base), config).save_pretrained(folder, save_embedding_layers=True)
    return folder


def as_of_a_wrapper(folder: Path, to: Path) -> str:
    """The same adapter with the names that the language model has in a multimodal model."""
    to.mkdir()
    (to / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    tensors = load_file(folder / "adapter_model.safetensors")
    old, new = "base_model.model.model.", "base_model.model.model.language_model."
    save_file({name.replace(old, new): t for name, t in tensors.items()}, to / "adapter_model.safetensors")
    return str(to)


@pytest.fixture(scope="module")
def rows(packed, tmp_path_factory) -> dict[str | None, list[Row]]:
    """The answers of one engine, by adapter."""
    wrapped = as_of_a_wrapper(Path(packed.folders["row42-DoRA"]), tmp_path_factory.mktemp("wrapped") / "dora")
    everyone = World(packed.base, packed.oracle, packed.folders | {WRAPPED: wrapped})
    return serve_by_name(everyone, "float32")


@pytest.mark.parametrize("name", [None, *RECIPES, COPIES], ids=str)
def test_answers_equal_peft(name, packed, rows):
    assert disagreement(packed, name, rows[name]) <= BOUND


@pytest.mark.parametrize("name", [WRAPPED])
def test_names_of_a_wrapper_give_the_same_answers(name, packed, rows):
    """PEFT itself does not load them."""
    assert disagreement(packed, "row42-DoRA", rows[name]) <= BOUND

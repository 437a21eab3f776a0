"""Every recipe: PEFT reads it back, its effect is clear, and writing it twice gives the same file."""

import json

import pytest
import torch
from safetensors.torch import load_file

from scute.agreement import mean_difference
from scute.testing.adapters import AMPLIFIED, write_adapter
from scute.testing.oracle import Oracle
from scute.testing.tiny import tiny_llama, tiny_prompts, tiny_qwen2

PROMPTS = tiny_prompts()


@pytest.fixture(scope="module", params=[tiny_llama, tiny_qwen2], ids=lambda make: make.__name__)
def oracle(request, tmp_path_factory):
    return Oracle(request.param(tmp_path_factory.mktemp("base")))


@pytest.mark.parametrize("name", AMPLIFIED)
def test_recipe_moves_the_log_probabilities(oracle, name, tmp_path):
    folder = write_adapter(oracle.base, name, tmp_path)
    effect = mean_difference(oracle.logprobs(PROMPTS, folder), oracle.logprobs(PROMPTS))
    assert effect > 0.05


@pytest.mark.parametrize("name", AMPLIFIED)
def test_no_tensor_is_left_at_the_identity(oracle, name, tmp_path):
    for key, tensor in load_file(write_adapter(oracle.base, name, tmp_path) / "adapter_model.safetensors").items():
        assert tensor.unique().numel() > tensor.numel() / 2, key


def test_recipe_is_reproducible_and_leaves_the_random_state_alone(oracle, tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first = load_file(write_adapter(oracle.base, "dora", tmp_path / "1") / "adapter_model.safetensors")
    assert torch.equal(torch.rand(1), expected)
    second = load_file(write_adapter(oracle.base, "dora", tmp_path / "2") / "adapter_model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_options_replace_those_of_the_recipe(oracle, tmp_path):
    config = json.loads((write_adapter(oracle.base, "vera", tmp_path, r=64) / "adapter_config.json").read_text())
    assert config["r"] == 64
    assert config["projection_prng_key"] == 8


def test_one_adapter_leaves_no_trace_in_the_base_or_in_the_next(oracle, tmp_path):
    before = oracle.logprobs(PROMPTS)
    folders = [write_adapter(oracle.base, name, tmp_path / name) for name in ("ia3", "oft")]
    first = [oracle.logprobs(PROMPTS, folder) for folder in folders]
    second = [oracle.logprobs(PROMPTS, folder) for folder in reversed(folders)][::-1]
    assert mean_difference(oracle.logprobs(PROMPTS), before) == 0
    assert [mean_difference(one, two) for one, two in zip(first, second, strict=True)] == [0, 0]

"""The comparison module by module: it agrees for every method, and finds the one projection that is wrong."""

import copy
from dataclasses import replace

import pytest

from scute.admission import BaseModel, compile_adapter
from scute.testing.adapters import AMPLIFIED, write_adapter
from scute.testing.oracle import Oracle
from scute.testing.tiny import tiny_prompts, tiny_qwen2
from scute.verify.modules import module_errors
from scute.verify.versions import versions

PROMPTS = tiny_prompts(2)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    return Oracle(tiny_qwen2(tmp_path_factory.mktemp("base")))


@pytest.fixture(scope="module")
def compared(oracle, tmp_path_factory):
    """The errors of a recipe, after `change` of its members."""
    base, root = BaseModel.from_module(oracle.base), tmp_path_factory.mktemp("adapters")

    def run(name, change=lambda members: members):
        folder = root / name if (root / name).exists() else write_adapter(oracle.base, name, root / name)
        form = compile_adapter(folder, base)
        form = replace(form, members=change(dict(form.members)))
        return module_errors(oracle.base, oracle.adapted(folder), form, base, PROMPTS)

    return run


@pytest.mark.parametrize("name", AMPLIFIED)
def test_every_method_agrees_with_pefts_layers(compared, name):
    errors = compared(name)
    assert errors
    assert all(error.ratio < 1e-5 for error in errors)


def test_the_vector_of_a_down_projection_is_compared_over_its_mlp(compared):
    assert {error.module.rpartition(".")[2] for error in compared("ia3")} == {"k_proj", "v_proj", "mlp"}


def test_a_wrong_projection_is_the_worst(compared):
    wrong = "model.layers.1.self_attn.v_proj"

    def spoil(members):
        (term,) = members[wrong].terms
        return members | {wrong: replace(members[wrong], terms=(replace(term, c=1.1 * term.c),))}

    worst, *others = compared("lora-r8", spoil)
    assert worst.module == wrong
    assert worst.ratio == pytest.approx(0.1, rel=1e-3)
    assert all(error.ratio < 1e-5 for error in others)


def test_the_base_model_is_left_as_it_was(oracle, compared):
    before = copy.deepcopy(oracle.base.state_dict())
    compared("dora")
    assert all(bool((before[name] == value).all()) for name, value in oracle.base.state_dict().items())
    assert not any("forward" in vars(module) for module in oracle.base.modules())


def test_versions_name_what_a_report_needs():
    assert {"scute", "torch", "transformers", "peft", "python", "device"} <= versions().keys()

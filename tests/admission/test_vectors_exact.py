"""(IA)3 and VeRA against PEFT's forward."""

import hashlib

import pytest
import torch
from peft import IA3Config, VeraConfig
from peft_oracle import assert_exact, rewrite_config, save, toy
from torch import nn

from scute.admission import BaseModel, compile_adapter
from scute.algebra import Owner, fold, live_slots

IA3_CASES = {
    "output side": (["q_proj", "v_proj"], []),
    "down projection": (["down_proj"], ["down_proj"]),
    "up and down projection": (["up_proj", "down_proj"], ["down_proj"]),
    "input side of both": (["up_proj", "down_proj"], ["up_proj", "down_proj"]),
    "as for Llama": (["q_proj", "v_proj", "down_proj"], ["down_proj"]),
    "input side of attention": (["q_proj", "o_proj"], ["o_proj"]),
    "no dot in front": (r".*\.[qv]_proj", ["_proj"]),
    "regex": (r"layers\.\d\.(mlp\.down|self_attn\.q)_proj", r".*down_proj"),
    "head": (["lm_head"], []),
}


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "not gated"])
@pytest.mark.parametrize("case", IA3_CASES)
def test_ia3_equals_peft(case, gated, tmp_path):
    targets, feed_forward = IA3_CASES[case]
    if isinstance(targets, list):
        config = IA3Config(target_modules=targets, feedforward_modules=[])
        config.feedforward_modules = set(feed_forward)
    else:
        config = IA3Config(target_modules=targets, feedforward_modules=feed_forward)
    base = toy()
    assert_exact(tmp_path, base, save(tmp_path, base, config), gated=gated)


def test_ia3_scales_the_up_projection_of_a_gated_mlp(tmp_path):
    base = toy()
    save(tmp_path, base, IA3Config(target_modules=["down_proj"], feedforward_modules=["down_proj"]))
    gated = compile_adapter(tmp_path, BaseModel.from_module(base, gated=True)).members
    plain = compile_adapter(tmp_path, BaseModel.from_module(base, gated=False)).members
    assert {name.rpartition(".")[2] for name in gated} == {"up_proj"}
    assert {name.rpartition(".")[2] for name in plain} == {"down_proj"}
    assert live_slots(gated["layers.0.mlp.up_proj"]) == ("s",)
    assert plain["layers.0.mlp.down_proj"].rotation.width == 1


def test_ia3_shape_decides_where_feedforward_modules_is_absent(tmp_path):
    base = toy()
    config = IA3Config(target_modules=["q_proj", "o_proj"], feedforward_modules=["o_proj"])
    adapted = save(tmp_path, base, config)
    rewrite_config(tmp_path, feedforward_modules=...)
    assert_exact(tmp_path, base, adapted)


class Thin(nn.Module):
    """A projection with one input and one output, where both sides have the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 1)
        self.middle = nn.Linear(1, 1)

    def forward(self, x):
        return self.middle(self.first(x))


@pytest.mark.parametrize("feed_forward", [True, False])
def test_ia3_feedforward_modules_decides_where_the_shape_cannot(feed_forward, tmp_path):
    torch.manual_seed(0)
    base = Thin().double()
    config = IA3Config(target_modules=["middle"], feedforward_modules=["middle"] if feed_forward else [])
    form = assert_exact(tmp_path, base, save(tmp_path, base, config))
    assert (form.members["middle"].rotation is not None) == feed_forward


VERA_CASES = {
    "saved": {},
    "regenerated": {"save_projection": False},
    "another key": {"save_projection": False, "projection_prng_key": 17},
    "bias vera_only": {"bias": "vera_only"},
    "bias all": {"bias": "all"},
    "one layer": {"layers_to_transform": [0], "layers_pattern": "layers"},
}


@pytest.mark.parametrize("case", VERA_CASES)
def test_vera_equals_peft(case, tmp_path):
    base = toy()
    config = VeraConfig(r=5, target_modules=["q_proj", "v_proj", "down_proj"], **VERA_CASES[case])
    form = assert_exact(tmp_path, base, save(tmp_path, base, config, spread=1.0))
    terms = [member.terms[0] for member in form.members.values() if member.terms]
    assert len({id(term.pair) for term in terms}) == 1
    assert all(term.a_owner is term.b_owner is Owner.SHARED for term in terms)
    assert all(term.a.untyped_storage().data_ptr() == term.pair.a.untyped_storage().data_ptr() for term in terms)


def test_vera_regenerates_a_pair_rounded_through_bfloat16(tmp_path):
    base = toy(torch.bfloat16)
    config = VeraConfig(r=5, target_modules=["q_proj", "down_proj"], save_projection=False)
    adapted = save(tmp_path, base, config)
    form = compile_adapter(tmp_path, BaseModel.from_module(base, torch.bfloat16))
    pair = form.members["layers.0.self_attn.q_proj"].terms[0].pair
    assert torch.equal(pair.a.T, adapted.base_model.vera_A["default"])
    assert torch.equal(pair.b.T, adapted.base_model.vera_B["default"])


def test_vera_key_follows_the_values(tmp_path):
    base = toy(torch.float32)

    def key(**options):
        folder = tmp_path / hashlib.md5(repr(options).encode()).hexdigest()
        save(folder, base, VeraConfig(r=5, target_modules=["q_proj"], **options))
        return (
            compile_adapter(folder, BaseModel.from_module(base)).members["layers.0.self_attn.q_proj"].terms[0].pair.key
        )

    assert key(projection_prng_key=1) == key(projection_prng_key=1, save_projection=False)
    assert key(projection_prng_key=1) != key(projection_prng_key=2)


def test_vera_fold_leaves_the_pair_alone(tmp_path):
    base = toy()
    save(tmp_path, base, VeraConfig(r=5, target_modules=["q_proj"]))
    member = compile_adapter(tmp_path, BaseModel.from_module(base)).members["layers.0.self_attn.q_proj"]
    folded, _ = fold(member)
    assert live_slots(folded) == ("d", "e")
    assert folded.terms[0].a is member.terms[0].a

"""OFT against PEFT's forward, and the series of PEFT 0.17 against a polynomial written out here."""

import pytest
import torch
from peft import OFTConfig
from peft_oracle import assert_exact, rewrite_config, save, toy

from scute.admission import BaseModel, compile_adapter

LAYER = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

CASES = {
    "defaults": {"oft_block_size": 4},
    "exact": {"oft_block_size": 4, "use_cayley_neumann": False},
    "blocks that do not divide": {"oft_block_size": 7},
    "number of blocks": {"oft_block_size": 0, "r": 3},
    "shared block": {"oft_block_size": 6, "block_share": True},
    "shared block, exact": {"oft_block_size": 6, "block_share": True, "use_cayley_neumann": False},
    "constrained": {"oft_block_size": 4, "coft": True, "eps": 0.7},
    "constrained, shared block, exact": {
        "oft_block_size": 4, "coft": True, "eps": 0.5, "block_share": True, "use_cayley_neumann": False,
    },
    "constrained, some within": {"oft_block_size": 4, "coft": True, "eps": 1.9},
    "bias oft_only": {"oft_block_size": 4, "bias": "oft_only"},
    "bias all": {"oft_block_size": 4, "bias": "all"},
    "dropout": {"oft_block_size": 4, "module_dropout": 0.5},
    "blocks of one": {"oft_block_size": 0, "r": 23, "target_modules": ["q_proj", "o_proj"]},
    **{f"{terms} terms": {"oft_block_size": 4, "num_cayley_neumann_terms": terms} for terms in (2, 3, 4, 6, 7)},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_equals_peft(case, tmp_path):
    base = toy()
    adapted = save(tmp_path, base, OFTConfig(**({"target_modules": LAYER} | CASES[case])), spread=0.2)
    assert_exact(tmp_path, base, adapted)


def test_one_term_is_the_identity(tmp_path):
    base = toy()
    save(tmp_path, base, OFTConfig(target_modules=["q_proj"], oft_block_size=4, num_cayley_neumann_terms=1))
    blocks = compile_adapter(tmp_path, BaseModel.from_module(base)).members["layers.0.self_attn.q_proj"].rotation.blocks
    assert torch.equal(blocks, torch.eye(4, dtype=blocks.dtype).expand(6, 4, 4))


def test_float32(tmp_path):
    base = toy(torch.float32)
    form = assert_exact(tmp_path, base, save(tmp_path, base, OFTConfig(target_modules=LAYER)), tolerance=1e-5)
    assert all(member.rotation.blocks.dtype is torch.float32 for member in form.members.values())


def series(skew, factors):
    """Sum of factors[i] Q^i."""
    return sum(factor * torch.linalg.matrix_power(skew, power) for power, factor in enumerate(factors))


OLD = {1: [1], 2: [1, 2], 3: [1, 2, 2], 4: [1, 2, 2, 2], 5: [1, 2, 2, 2, 2]}
NEW = {1: [1], 2: [1, 2], 3: [1, 2, 2, 1], 4: [1, 2, 2, 1], 5: [1, 2, 2, 2, 1]}


@pytest.mark.parametrize("terms", OLD)
@pytest.mark.parametrize(
    ("peft_version", "factors"),
    [
        (..., OLD),
        (None, OLD),
        ("0.17.1", OLD),
        ("0.18.0", NEW),
        ("0.21.3.dev0@5f2c1", NEW),
        ("0.19.0.dev0@UNKNOWN", NEW),
    ],
)
def test_peft_version_decides_the_series(peft_version, factors, terms, tmp_path):
    base = toy()
    config = OFTConfig(target_modules=["q_proj"], oft_block_size=4, num_cayley_neumann_terms=terms)
    adapted = save(tmp_path, base, config)
    rewrite_config(tmp_path, peft_version=peft_version)
    packed = adapted.get_submodule("base_model.model.layers.0.self_attn.q_proj.oft_R.default").weight
    skew = torch.zeros(6, 4, 4, dtype=torch.float64)
    for column, (i, j) in enumerate([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]):
        skew[:, i, j], skew[:, j, i] = packed[:, column], -packed[:, column]
    blocks = compile_adapter(tmp_path, BaseModel.from_module(base)).members["layers.0.self_attn.q_proj"].rotation.blocks
    torch.testing.assert_close(blocks, series(skew, factors[terms]), rtol=1e-12, atol=1e-12)

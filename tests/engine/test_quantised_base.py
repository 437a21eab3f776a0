"""Adapters on bases of 4 bits in the usual formats, held against PEFT on the dequantised weights, in one batch.

vLLM's own GEMM runs these layers, on each slice by itself where an adapter of the batch rotates (`layer_gemm`).
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import World, disagreement, serve_by_name
from safetensors.torch import load_file, save_file
from torch import Tensor

from scute.engine.offline import Row
from scute.testing.adapters import AMPLIFIED, write_adapter
from scute.testing.oracle import Oracle
from scute.testing.tiny import tiny_llama

pytestmark = pytest.mark.engine

BOUND = 0.0025
"""An eighth of bfloat16's in `test_agreement`: float16 has three bits more."""

GROUP = 32
IN_ORDER, AWQ_ORDER = range(8), (0, 2, 4, 6, 1, 3, 5, 7)

Quantised = tuple[dict[str, Tensor], Tensor]
"""The tensors that stand for a weight [out, in], and the weight that they stand for."""


def pack(values: Tensor, order: Any = IN_ORDER) -> Tensor:
    """Numbers below 16, eight in an int32 along the last dimension."""
    eight = values.long().unflatten(-1, (-1, 8))[..., list(order)]
    return (eight << (4 * torch.arange(8))).sum(-1).to(torch.int32)


def grouped(weight: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values [out, in] and zeros [out, groups] below 16, scales [out, groups], and the weight that these stand for."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.aminmax(dim=2)
    scale = ((groups.abs().amax(2) / 7) if symmetric else ((high - low) / 15)).half()
    zero = torch.full_like(low, 8) if symmetric else (-low / scale.float()).round()
    values = ((groups / scale.float()[..., None]).round() + zero[..., None]).clamp(0, 15)
    dense = ((values - zero[..., None]).half() * scale[..., None]).float().flatten(1)
    return values.flatten(1), zero, scale, dense


def compressed(weight: Tensor) -> Quantised:
    values, _, scale, dense = grouped(weight, symmetric=True)
    return {"weight_packed": pack(values), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}, dense


def gptq(weight: Tensor) -> Quantised:
    values, zero, scale, dense = grouped(weight, symmetric=True)
    groups = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    return {"qweight": pack(values).T, "qzeros": pack(zero.T - 1), "scales": scale.T, "g_idx": groups}, dense


def awq(weight: Tensor) -> Quantised:
    values, zero, scale, dense = grouped(weight, symmetric=False)
    return {"qweight": pack(values.T, AWQ_ORDER), "qzeros": pack(zero.T, AWQ_ORDER), "scales": scale.T}, dense


WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
FORMATS: dict[str, tuple[Callable[[Tensor], Quantised], dict[str, Any]]] = {
    "compressed-tensors": (
        compressed,
        {
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
            "ignore": ["lm_head"],
        },
    ),
    "gptq": (gptq, {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}),
    "awq": (awq, {"bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
}


def write_base(folder: Path, dense_folder: Path, method: str) -> None:
    """A quantised Llama, and the one that it stands for."""
    quantise, options = FORMATS[method]
    tiny_llama(folder, torch.float16)
    shutil.copytree(folder, dense_folder)
    tensors, dense = load_file(folder / "model.safetensors"), load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        made, dense[name] = quantise(tensors.pop(name).float())
        tensors |= {name.removesuffix("weight") + kind: tensor.contiguous() for kind, tensor in made.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    save_file(dense, dense_folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, **options}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module", params=FORMATS)
def quantised(request, tmp_path_factory) -> World:
    root = tmp_path_factory.mktemp(request.param)
    write_base(root / "base", root / "dense", request.param)
    oracle = Oracle(root / "dense")
    folders = {name: str(write_adapter(oracle.base, name, root / name)) for name in AMPLIFIED}
    return World(root / "base", oracle, folders)


@pytest.fixture(scope="module")
def rows(quantised) -> dict[str | None, list[Row]]:
    """The answers of one engine, by adapter."""
    return serve_by_name(quantised, "float16")


@pytest.mark.parametrize("name", [None, *AMPLIFIED], ids=str)
def test_answers_equal_peft(name, quantised, rows):
    assert disagreement(quantised, name, rows[name]) <= BOUND

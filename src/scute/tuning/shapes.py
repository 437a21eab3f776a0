"""The fused projections of a base model, as vLLM holds them on one rank."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from scute.tuning.layers import LayerShape

# vLLM's fused layers of decoder models, and the projections that are cut along their input by tensor parallelism.
FUSED = {"qkv": ("q_proj", "k_proj", "v_proj"), "gate_up": ("gate_proj", "up_proj")}
ROW_PARALLEL = frozenset({"o_proj", "down_proj"})


def read_shapes(folder: Path, tensor_parallel_size: int = 1) -> tuple[LayerShape, ...]:
    """Every different fused projection of the model whose config.json is in `folder`.

    Raises ValueError if transformers knows no such model, or if a projection cannot be cut into that many parts.
    """
    import torch
    from transformers import AutoConfig

    from scute.admission.base import BaseModel

    json.loads((folder / "config.json").read_text())  # its errors are clearer than those of transformers
    base = BaseModel.from_config(AutoConfig.from_pretrained(folder), torch.float16)
    sizes = {name: (p.in_features, p.out_features) for name, p in base.projections.items() if name != base.output_head}
    return tuple(dict.fromkeys(fuse(sizes, tensor_parallel_size)))


def fuse(sizes: Mapping[str, tuple[int, int]], parts: int) -> Iterator[LayerShape]:
    """sizes: of every projection, (in, out), by its module name."""
    groups = {
        (fused, module.rpartition(".")[0]) for module in sizes for fused in FUSED if _is_whole(module, fused, sizes)
    }
    for module, (wide, out) in sizes.items():
        parent, _, leaf = module.rpartition(".")
        fused = next((name for name, parts_of in FUSED.items() if leaf in parts_of and (name, parent) in groups), None)
        if fused is None:
            name, cut = leaf.removesuffix("_proj"), leaf in ROW_PARALLEL
            columns = wide if not cut else _cut(module, wide, parts)
            yield LayerShape(name, columns, (out if cut else _cut(module, out, parts),))
        elif leaf == FUSED[fused][0]:
            outs = [sizes[f"{parent}.{name}"][1] for name in FUSED[fused]]
            yield LayerShape(fused, wide, tuple(_cut(module, size, parts) for size in outs))


def _is_whole(module: str, fused: str, sizes: Mapping[str, tuple[int, int]]) -> bool:
    parent = module.rpartition(".")[0]
    return all(f"{parent}.{name}" in sizes for name in FUSED[fused])


def _cut(module: str, size: int, parts: int) -> int:
    if size % parts:
        raise ValueError(f"{module} has {size} features, which tensor parallelism cannot cut into {parts} parts")
    return size // parts

"""Fused projections of a base model, as vLLM holds them on one rank."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

# vLLM's fused layers of decoder models, and the projections that are cut along their input by tensor parallelism.
FUSED = {"qkv": ("q_proj", "k_proj", "v_proj"), "gate_up": ("gate_proj", "up_proj")}
ROW_PARALLEL = frozenset({"o_proj", "down_proj"})


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One fused projection: its input width and its output slices."""

    name: str
    in_features: int
    slices: tuple[int, ...]

    @property
    def out_features(self) -> int:
        return sum(self.slices)

    @property
    def starts(self) -> list[int]:
        return [0, *accumulate(self.slices)]


class FusedLayer(NamedTuple):
    """modules: the base model's name of each slice's projection."""

    shape: LayerShape
    modules: tuple[str, ...]


def fused_layers(sizes: Mapping[str, tuple[int, int]], parts: int = 1) -> Iterator[FusedLayer]:
    """sizes: of every projection, (in, out), by its module name; parts: the tensor-parallel size.

    Raises ValueError if a projection cannot be cut into that many parts.
    """
    groups = {
        (fused, module.rpartition(".")[0]) for module in sizes for fused in FUSED if _is_whole(module, fused, sizes)
    }
    for module, (wide, out) in sizes.items():
        parent, _, leaf = module.rpartition(".")
        fused = next((name for name, parts_of in FUSED.items() if leaf in parts_of and (name, parent) in groups), None)
        if fused is None:
            name, cut = leaf.removesuffix("_proj"), leaf in ROW_PARALLEL
            columns = wide if not cut else _cut(module, wide, parts)
            yield FusedLayer(LayerShape(name, columns, (out if cut else _cut(module, out, parts),)), (module,))
        elif leaf == FUSED[fused][0]:
            modules = tuple(f"{parent}.{name}" for name in FUSED[fused])
            slices = tuple(_cut(module, sizes[name][1], parts) for name in modules)
            yield FusedLayer(LayerShape(fused, wide, slices), modules)


def _is_whole(module: str, fused: str, sizes: Mapping[str, tuple[int, int]]) -> bool:
    parent = module.rpartition(".")[0]
    return all(f"{parent}.{name}" in sizes for name in FUSED[fused])


def _cut(module: str, size: int, parts: int) -> int:
    if size % parts:
        raise ValueError(f"{module} has {size} features, which tensor parallelism cannot cut into {parts} parts")
    return size // parts

"""The fused projections of a base model, as vLLM holds them on one rank."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from scute.costs.layers import LayerShape, fused_layers


def read_shapes(folder: Path, tensor_parallel_size: int = 1) -> tuple[LayerShape, ...]:
    """Every different fused projection of the model whose config.json is in `folder`.

    Raises ValueError if transformers knows no such model, or if a projection cannot be cut into that many parts.
    """
    from scute.admission.base_folder import read_base

    base = read_base(folder)
    sizes = {name: (p.in_features, p.out_features) for name, p in base.projections.items() if name != base.output_head}
    return tuple(dict.fromkeys(fuse(sizes, tensor_parallel_size)))


def fuse(sizes: Mapping[str, tuple[int, int]], parts: int) -> Iterator[LayerShape]:
    """sizes: of every projection, (in, out), by its module name."""
    return (shape for shape, _ in fused_layers(sizes, parts))

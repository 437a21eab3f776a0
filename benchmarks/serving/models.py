"""Base models with random weights, drawn on the device and written once, so that every engine reads the same."""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from scute.testing.tiny import SHAPE, weight

SHAPES: Mapping[str, Mapping[str, object]] = {
    "tiny": SHAPE | {"max_position_embeddings": 1024},
    "llama-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
}
NORMS = "column_norms.safetensors"


def shape(model: str, layers: int | None = None) -> LlamaConfig:
    """The configuration of a named shape, cut to `layers` layers if given."""
    cut = {} if layers is None else {"num_hidden_layers": layers}
    return LlamaConfig(**SHAPES[model] | cut)


def write_base(folder: Path, config: LlamaConfig, dtype: torch.dtype, device: str, seed: int = 0) -> Path:
    """Write a Hugging Face folder with one file a layer; returns `folder`.

    The norms of every projection's columns, which DoRA's magnitude starts from, go into a file of their own that is
    no part of the model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(device).manual_seed(seed)
    norms: dict[str, Tensor] = {}
    index: dict[str, str] = {}
    with ThreadPoolExecutor(4) as disk:
        writes = []
        for number, shapes in enumerate(_files(config)):
            name = f"model-{number:05}.safetensors"
            tensors = {}
            for key, size in shapes.items():
                drawn = weight(key, torch.randn(size, generator=generator, device=device)).to(dtype)
                if key.endswith("_proj.weight"):
                    norms[key.removesuffix(".weight")] = drawn.float().norm(dim=1).cpu()
                tensors[key] = drawn.cpu()
            index |= dict.fromkeys(tensors, name)
            writes.append(disk.submit(save_file, tensors, folder / name, {"format": "pt"}))
        for write in writes:
            write.result()
    save_file(norms, folder.with_name(f"{folder.name}-{NORMS}"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = dtype
    config.save_pretrained(folder)  # last: a folder with a config is complete
    return folder


def column_norms(folder: Path) -> dict[str, Tensor]:
    """Float32 norms [out] by the name of the projection, of a folder that `write_base` wrote."""
    return load_file(folder.with_name(f"{folder.name}-{NORMS}"))


def _files(config: LlamaConfig) -> Iterator[dict[str, torch.Size]]:
    """Names and shapes of the parameters, file by file: one a layer, then the rest."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in LlamaForCausalLM(config).named_parameters()}
    for layer in range(config.num_hidden_layers):
        yield {name: shapes.pop(name) for name in list(shapes) if name.startswith(f"model.layers.{layer}.")}
    yield shapes

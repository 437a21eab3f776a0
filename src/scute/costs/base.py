"""The base model as costs see it: fused layers, the bytes of its weights, and those of its KV cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from scute.costs.layers import FusedLayer, fused_layers

if TYPE_CHECKING:
    from scute.admission import BaseModel


@dataclass(frozen=True, slots=True)
class Base:
    """name: of its folder; layers: in order. weight_bytes: of all parameters in the dtype that they are served in.

    kv_token_bytes: keys and values of one token in all layers. itemsize: bytes of an element. biased: modules that
    have a bias.
    """

    name: str
    layers: tuple[FusedLayer, ...]
    weight_bytes: int = 0
    kv_token_bytes: int = 0
    itemsize: int = 2
    biased: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: "BaseModel", hf_config: Any, name: str) -> Self:
        """Raises ValueError for a config without the sizes of attention."""
        sizes = {m: (p.in_features, p.out_features) for m, p in model.projections.items() if m != model.output_head}
        return cls(
            name=name,
            layers=tuple(fused_layers(sizes)),
            weight_bytes=model.num_parameters * model.dtype.itemsize,
            kv_token_bytes=_kv_elements(hf_config.get_text_config().to_dict()) * model.dtype.itemsize,
            itemsize=model.dtype.itemsize,
            biased=frozenset(module for module, p in model.projections.items() if p.has_bias),
        )


def read_base(folder: Path) -> tuple[Base, "BaseModel"]:
    """The base model of a folder, whose config.json is enough, as costs and as admission see it.

    Raises OSError, ValueError or KeyError where transformers cannot make the folder's model.
    """
    import torch
    from transformers import AutoConfig

    from scute.admission import BaseModel

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    model = BaseModel.from_config(config, getattr(config, "dtype", None) or torch.float32)
    return Base.of(model, config, folder.name), model


def _kv_elements(config: Mapping[str, Any]) -> int:
    """Of one token, in all layers."""
    try:
        heads = config["num_attention_heads"]
        kept = config.get("num_key_value_heads") or heads
        width = config.get("head_dim") or config["hidden_size"] // heads
        return int(2 * config["num_hidden_layers"] * kept * width)
    except KeyError as error:
        raise ValueError(f"its config.json has no {error}, so the size of its KV cache is not known") from error

"""The base model as costs see it: fused layers, the bytes of its weights, and those of its KV cache."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from scute.costs.layers import FusedLayer, fused_layers
from scute.costs.slots import Counting

if TYPE_CHECKING:
    from scute.admission import BaseModel


@dataclass(frozen=True, slots=True)
class Base:
    """name: of its folder; layers: in order. weight_bytes: of all parameters in the dtype that they are served in.

    kv_token_bytes: keys and values of one token in all layers. itemsize: bytes of an element. biased: modules that
    have a bias. kv_token_bytes is 0 where only the adapters are asked about.
    """

    name: str
    layers: tuple[FusedLayer, ...]
    weight_bytes: int = 0
    kv_token_bytes: int = 0
    itemsize: int = 2
    biased: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: "BaseModel", name: str, hf_config: Any = None) -> Self:
        """hf_config: for the KV cache, whose bytes are 0 without it. Raises ValueError if it has no attention."""
        sizes = {m: (p.in_features, p.out_features) for m, p in model.projections.items() if m != model.output_head}
        return cls(
            name=name,
            layers=tuple(fused_layers(sizes)),
            weight_bytes=model.num_parameters * model.dtype.itemsize,
            kv_token_bytes=0 if hf_config is None else _kv_elements(hf_config.get_text_config()) * model.dtype.itemsize,
            itemsize=model.dtype.itemsize,
            biased=frozenset(module for module, p in model.projections.items() if p.has_bias),
        )

    @property
    def counting(self) -> Counting:
        """Factors as the base weights are served, vectors in float32."""
        return Counting(factor=self.itemsize)

    @property
    def pair_bytes_a_rank(self) -> int:
        """Of a place for a shared pair, which is as wide as the widest layer, whatever the pair (engine/pairs.py)."""
        widest_in = max((shape.in_features for shape, _ in self.layers), default=0)
        widest_out = max((out for shape, _ in self.layers for out in shape.slices), default=0)
        return self.itemsize * (widest_in + widest_out)


def read_base(folder: Path) -> tuple[Base, "BaseModel"]:
    """The base model of a folder, whose config.json is enough, as costs and as admission see it.

    Raises ValueError where transformers cannot make the folder's model, or its KV cache is not known.
    """
    from scute.admission.base_folder import base_of, read_hf_config

    config = read_hf_config(folder)
    model = base_of(folder, config)
    return Base.of(model, folder.resolve().name, config), model


def _kv_elements(config: Any) -> int:
    """Of one token, in all layers. config: of the text model, whose attributes have one name each in all models."""
    try:
        if getattr(config, "kv_lora_rank", None):  # latent attention keeps one vector for all heads
            return int(config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim))
        heads = config.num_attention_heads
        kept = getattr(config, "num_key_value_heads", None) or heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        return int(2 * config.num_hidden_layers * kept * width)
    except AttributeError as error:
        raise ValueError(f"config.json has no {error.name}, so the size of the KV cache is not known") from error

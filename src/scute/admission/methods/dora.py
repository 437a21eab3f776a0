"""DoRA (https://arxiv.org/abs/2402.09353): LoRA with use_dora.

PEFT 0.21.2: `peft.tuners.lora.dora.DoraLinearLayer`.

    y = (x W + c (x A) B) ⊙ s + b       s = magnitude / norm of every column of W + c A B

The tensors of LoRA, and lora_magnitude_vector [out], which PEFT 0.10 to 0.21 saves without ".weight" behind it.
The base bias is neither scaled nor part of the norm. s needs W, so the member keeps the magnitude.
"""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from scute.admission.base import BaseModel
from scute.admission.biases import take_base_bias
from scute.admission.methods.lora import LowRankConfig, check_init, take_factors
from scute.admission.methods.method import Method
from scute.admission.sites import Site
from scute.admission.tensors import Tensors
from scute.algebra.form import Bias, Member, Term

MAGNITUDE = "lora_magnitude_vector"


class DoraConfig(LowRankConfig):
    """The fields of DoRA, which PEFT does not combine with lora_bias."""

    refused: ClassVar[dict[str, str]] = LowRankConfig.refused | {
        "lora_bias": "PEFT does not support it together with use_dora; train with one of the two",
    }


def build(config: DoraConfig, sites: Mapping[str, Site], _: BaseModel, __: Tensors) -> dict[str, Member]:
    return {module: _member(config, site) for module, site in sites.items()}


def _member(config: DoraConfig, site: Site) -> Member:
    a, b, scale = take_factors(config, site)
    return Member(
        bias=Bias(replaced=take_base_bias(site, config.bias)),
        terms=(Term(a, b, scale),),
        magnitude=_take_magnitude(site),
    )


def _take_magnitude(site: Site) -> Tensor:
    suffix = MAGNITUDE if site.has(MAGNITUDE) or not site.has(f"{MAGNITUDE}.weight") else f"{MAGNITUDE}.weight"
    return site.take(suffix, site.projection.out_features)


METHOD = Method(
    name="DoRA",
    peft_type="LORA",
    config=DoraConfig,
    suffixes=("lora_A.weight", "lora_B.weight", MAGNITUDE, f"{MAGNITUDE}.weight"),
    build=build,
    claims=lambda raw: bool(raw.get("use_dora")),
    check=check_init,
)

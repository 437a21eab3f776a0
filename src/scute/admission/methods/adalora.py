"""AdaLoRA (https://arxiv.org/abs/2303.10512).

PEFT 0.21.2: `peft.tuners.adalora.layer.SVDLinear`, `AdaLoraModel.resize_modules_by_rank_pattern`.

    y = x W + b + c ((x A) ⊙ d) B       c = (alpha if it is positive, else r) / (init_r + 1e-5)

lora_A [r, in] is A transposed, lora_B [out, r] is B transposed, and lora_E [r, 1] is d. r is init_r, or how many of a
projection's directions rank_pattern has kept; of those that it has dropped the file has no rows.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveInt

from scute.admission.base import BaseModel
from scute.admission.biases import take_base_bias
from scute.admission.config import AdapterConfig
from scute.admission.methods.lora import LowRankConfig
from scute.admission.methods.method import Method
from scute.admission.sites import Site
from scute.admission.tensors import CONFIG_FILE, Tensors
from scute.algebra.fold import live_slots
from scute.algebra.form import Bias, Member, Term
from scute.errors import Code, Refusal, shown

Kept = Annotated[dict[str, list[bool]], BeforeValidator(lambda value: {} if value is None else value)]


class AdaLoraConfig(AdapterConfig):
    """The fields of AdaLoRA. PEFT's class has all of LoRA's too; its layer does not look at those that are inert."""

    inert: ClassVar[frozenset[str]] = LowRankConfig.inert | {
        "r",
        "target_r",
        "tinit",
        "tfinal",
        "deltaT",
        "beta1",
        "beta2",
        "orth_reg_weight",
        "total_step",
        "init_lora_weights",
        "use_rslora",
        "alpha_pattern",
        "lora_bias",
    }
    refused: ClassVar[dict[str, str]] = LowRankConfig.refused | {
        "use_dora": "PEFT does not combine it with AdaLoRA; train with one of the two",
    }

    init_r: PositiveInt
    lora_alpha: float
    rank_pattern: Kept = Field(default_factory=dict)
    bias: Literal["none", "all", "lora_only"] = "none"


def build(config: AdaLoraConfig, sites: Mapping[str, Site], _: BaseModel, __: Tensors) -> dict[str, Member]:
    ranks = {key.rpartition(".")[0]: sum(kept) for key, kept in config.rank_pattern.items()}
    members = {module: _member(config, site, ranks.get(module, config.init_r)) for module, site in sites.items()}
    changing = {module: member for module, member in members.items() if live_slots(member) or member.terms}
    unknown = next((key for key in config.rank_pattern if key.rpartition(".")[0] not in sites), None)
    if unknown is not None or not changing:
        what = "leaves no direction of any projection"
        if unknown is not None:
            what = f"has {shown(unknown)}, which is no tensor of an adapted projection"
        sentence = f"{CONFIG_FILE}: rank_pattern {what}. Serve the folder as PEFT saved it."
        next(iter(sites.values())).refuse(Refusal(Code.CONFIG_MISMATCH, sentence))
    return changing


def _member(config: AdaLoraConfig, site: Site, rank: int) -> Member:
    """Where the training has dropped every direction, only a bias is left."""
    a = site.take("lora_A", rank, site.projection.in_features)
    b = site.take("lora_B", site.projection.out_features, rank)
    d = site.take("lora_E", rank, 1)
    alpha = config.lora_alpha if config.lora_alpha > 0 else float(rank)
    term = Term(a.T, b.T, alpha / (config.init_r + 1e-5), d[:, 0])
    return Member(bias=Bias(replaced=take_base_bias(site, config.bias)), terms=(term,) * bool(rank))


METHOD = Method(
    name="AdaLoRA",
    peft_type="ADALORA",
    config=AdaLoraConfig,
    suffixes=("lora_A", "lora_B", "lora_E"),
    build=build,
)

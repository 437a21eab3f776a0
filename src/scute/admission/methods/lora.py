"""LoRA (https://arxiv.org/abs/2106.09685) and rsLoRA (https://arxiv.org/abs/2312.03732).

PEFT 0.21.2: `peft.tuners.lora.layer.Linear`.

    y = x W + b + c (x A) B       c = alpha / r, or alpha / sqrt(r) with use_rslora

lora_A.weight [r, in] is A transposed; lora_B.weight [out, r] is B transposed; lora_B.bias [out] (lora_bias) adds
c lora_B.bias to b; base_layer.bias [out] (bias = "lora_only" or "all") takes the place of b.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import Field, PositiveInt, ValidationInfo, field_validator
from torch import Tensor

from scute.admission.base import BaseModel
from scute.admission.biases import take_base_bias
from scute.admission.config import AdapterConfig, AlphaPattern, RankPattern
from scute.admission.methods.method import Method, RawConfig
from scute.admission.patterns import Expressions, end_of_name
from scute.admission.sites import Site
from scute.admission.tensors import CONFIG_FILE, Tensors
from scute.algebra.fold import product
from scute.algebra.form import Bias, Member, Term
from scute.errors import Code, Refusal, shown

HARMLESS_INITS = ("true", "gaussian", "eva", "orthogonal", "mica")
BASE_CHANGING_INITS = ("pissa", "olora", "corda", "lora_ga", "loftq")
MAX_RANK = 512
"""Largest rank that an engine serves, and the most that vLLM's --max-lora-rank may be; conversions take any."""
Value = TypeVar("Value")


class LowRankConfig(AdapterConfig):
    """The fields that LoRA and DoRA share. The switches of LoRA's other variants are refused."""

    inert: ClassVar[frozenset[str]] = AdapterConfig.inert | frozenset(
        {
            "lora_dropout",
            "megatron_config",
            "megatron_core",
            "loftq_config",
            "eva_config",
            "corda_config",
            "lora_ga_config",
            "qalora_group_size",
            "ensure_weight_tying",
        }
    )
    refused: ClassVar[dict[str, str]] = AdapterConfig.refused | {
        "trainable_token_indices": "it replaces rows of the embedding; train without it",
        "layer_replication": "it changes the layers of the base model; serve the replicated model as a base of its own",
        "target_parameters": "it adapts bare parameters, as of experts, and Scute serves linear projections only",
        "alora_invocation_tokens": "aLoRA switches the adapter on in the middle of a prompt, which Scute does not do",
        "use_qalora": "QA-LoRA pools the input over a quantised base, which Scute does not do",
        "use_bdlora": "BD-LoRA has block-diagonal factors, which Scute does not read",
        "arrow_config": "Arrow routes every token among several adapters, which is no single adapter",
        "kasa_config": "KaSA removes singular directions of the base weight, which a batch shares",
        "velora_config": "VeLoRA files carry tensors that Scute does not read; save the adapter as plain LoRA",
        "monteclora_config": "MonteCLoRA files carry a sampler that Scute does not read; save it as plain LoRA",
    }

    r: PositiveInt
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: RankPattern = Field(default_factory=dict)
    alpha_pattern: AlphaPattern = Field(default_factory=dict)
    bias: Literal["none", "all", "lora_only"] = "none"
    init_lora_weights: bool | str | None = True
    use_dora: bool = False

    @field_validator("layers_to_transform", "layers_pattern")
    @classmethod
    def _targets_are_a_list(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None and isinstance(info.data.get("target_modules"), str):
            raise ValueError("it needs target_modules to be a list; PEFT does not load it with a string")
        return value


class LoraConfig(LowRankConfig):
    """The fields of plain LoRA."""

    lora_bias: bool = False


def build(config: LoraConfig, sites: Mapping[str, Site], _: BaseModel, __: Tensors) -> dict[str, Member]:
    return {module: _member(config, site) for module, site in sites.items()}


def _member(config: LoraConfig, site: Site) -> Member:
    a, b, scale = take_factors(config, site)
    shift = None
    if config.lora_bias:
        shift = product(site.take("lora_B.bias", site.projection.out_features), scale)
    bias = Bias(replaced=take_base_bias(site, config.bias), shift=shift)
    return Member(bias=bias, terms=(Term(a, b, scale),))


def take_factors(config: LowRankConfig, site: Site) -> tuple[Tensor, Tensor, float]:
    """A [in, r], B [r, out] and c; r is what the config gives this module, as PEFT would build it."""
    rank = first_hit(config.rank_pattern, site.module, config.r, config.expressions)
    alpha = first_hit(config.alpha_pattern, site.module, config.lora_alpha, config.expressions)
    a = site.take("lora_A.weight", rank, site.projection.in_features)
    b = site.take("lora_B.weight", site.projection.out_features, rank)
    return a.T, b.T, alpha / (math.sqrt(rank) if config.use_rslora else rank)


def first_hit(pattern: Mapping[str, Value], module: str, default: Value, expressions: Expressions) -> Value:
    """The value of the first key, a regular expression, that matches the end of the module's name.

    PEFT: `get_pattern_key`, peft/utils/other.py; a key that equals the name counts even if it does not match.
    """
    key = next((key for key in pattern if expressions.match(end_of_name(key), module)), module)
    return pattern.get(key, default)


def check_init(raw: RawConfig, _: Tensors) -> None:
    """Refuse INIT_CHANGED_BASE for an initialisation that subtracts from the base weight, if saved unconverted."""
    init: Any = raw.get("init_lora_weights")
    if not isinstance(init, str) or init.lower() in HARMLESS_INITS:
        return
    if init.lower().startswith(BASE_CHANGING_INITS):
        raise Refusal(
            Code.INIT_CHANGED_BASE,
            f"{CONFIG_FILE}: init_lora_weights = {shown(init)} trained against a changed base weight. "
            "Save again with save_pretrained(..., path_initial_model_for_weight_conversion=...), "
            "which makes a plain LoRA of it; for LoftQ, serve the LoftQ base and set the field to true.",
        )
    known = ", ".join(HARMLESS_INITS)
    raise Refusal(
        Code.CONFIG_INVALID, f"{CONFIG_FILE}: init_lora_weights = {shown(init)}; expected a boolean or {known}."
    )


METHOD = Method(
    name="LoRA",
    peft_type="LORA",
    config=LoraConfig,
    suffixes=("lora_A.weight", "lora_B.weight", "lora_B.bias"),
    build=build,
    claims=lambda raw: not raw.get("use_dora"),
    check=check_init,
)

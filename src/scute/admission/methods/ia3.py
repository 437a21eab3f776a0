"""(IA)3 (https://arxiv.org/abs/2205.05638).

PEFT 0.21.2: `peft.tuners.ia3.layer.Linear`.

    y = (x W + b) ⊙ l        ia3_l [out, 1], a projection that feedforward_modules does not name
    y = (x ⊙ l) W + b        ia3_l [1, in], one that it does name

The base bias is scaled on the output side and not on the input side. On the input side l is a diagonal R, which
`admission/gated.py` makes a scale of the up projection where the MLP is gated (paper, section 3.1).
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import ValidationInfo, field_validator
from torch import Tensor

from scute.admission.base import BaseModel
from scute.admission.config import AdapterConfig, Names
from scute.admission.methods.method import Method
from scute.admission.sites import Site
from scute.admission.tensors import CONFIG_FILE, Tensors
from scute.algebra.form import Bias, Member, Rotation
from scute.errors import Code, Refusal

VECTOR = "ia3_l"


class Ia3Config(AdapterConfig):
    """The fields of (IA)3."""

    absent: ClassVar[frozenset[str]] = frozenset({"layers_to_transform", "layers_pattern"})
    inert: ClassVar[frozenset[str]] = AdapterConfig.inert | {"init_ia3_weights"}

    feedforward_modules: Names | None = None

    @field_validator("feedforward_modules")
    @classmethod
    def _are_targets(cls, value: Any, info: ValidationInfo) -> Any:
        targets = info.data.get("target_modules")
        if isinstance(value, list) and isinstance(targets, list) and not set(value) <= set(targets):
            raise ValueError("it names modules that target_modules does not; PEFT does not load it so")
        return value


def build(config: Ia3Config, sites: Mapping[str, Site], _: BaseModel, __: Tensors) -> dict[str, Member]:
    return {module: _member(site, _is_feed_forward(config, site)) for module, site in sites.items()}


def _member(site: Site, is_feed_forward: bool) -> Member:
    vector = _take_vector(site, is_feed_forward)
    if is_feed_forward:
        return Member(rotation=Rotation(vector[:, None, None]))
    return Member(scale=vector, bias=Bias(scaled=True))


def _take_vector(site: Site, is_feed_forward: bool) -> Tensor:
    shape = (1, site.projection.in_features) if is_feed_forward else (site.projection.out_features, 1)
    return site.take(VECTOR, *shape).flatten()


def _is_feed_forward(config: Ia3Config, site: Site) -> bool:
    """The shape tells the side, and must agree with PEFT's rule: `IA3Model._check_target_module_feedforward`."""
    named = _is_named(config, site.module)
    shape = site.shape(VECTOR)
    output_side, input_side = (site.projection.out_features, 1), (1, site.projection.in_features)
    if named is None:
        return shape == input_side
    if output_side != input_side and shape == (output_side if named else input_side):
        site.refuse(
            Refusal(
                Code.CONFIG_MISMATCH,
                f"{site.name(VECTOR)} has shape {list(shape)}, which is the {'output' if named else 'input'} side, but "
                f"feedforward_modules in {CONFIG_FILE} says the other. PEFT cannot load this adapter either.",
            )
        )
        return shape == input_side
    return named


def _is_named(config: Ia3Config, module: str) -> bool | None:
    """PEFT compares without a dot in front: "proj" names every module that ends in it."""
    names = config.feedforward_modules
    if names is None:
        return None
    if isinstance(names, str):
        return config.expressions.fullmatch(names, module) is not None
    return module.endswith(tuple(names))


METHOD = Method(name="(IA)3", peft_type="IA3", config=Ia3Config, suffixes=(VECTOR,), build=build)

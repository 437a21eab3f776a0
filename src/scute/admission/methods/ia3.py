"""(IA)3 (https://arxiv.org/abs/2205.05638).

PEFT 0.21.2: `peft.tuners.ia3.layer.Linear`.

    y = (x W + b) ⊙ l        ia3_l [out, 1], a projection that feedforward_modules does not name
    y = (x ⊙ l) W + b        ia3_l [1, in], one that it does name

The base bias is scaled on the output side and not on the input side. On the down projection of a gated MLP, l is
the output scale of the up projection (paper, section 3.1); on any other module it is a diagonal R.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import ValidationInfo, field_validator
from torch import Tensor

from scute.admission.base import BaseModel
from scute.admission.config import AdapterConfig, Names
from scute.admission.methods.method import Method
from scute.admission.patterns import whole_name
from scute.admission.sites import Site
from scute.admission.tensors import CONFIG_FILE, Tensors
from scute.algebra.fold import product
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


def build(config: Ia3Config, sites: Mapping[str, Site], base: BaseModel, _: Tensors) -> dict[str, Member]:
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    for module, site in sites.items():
        side = inputs if _is_feed_forward(config, site) else outputs
        side[module] = _take_vector(site, side is inputs)
    for down in [module for module in inputs if module in base.gated_up]:
        up, vector = base.gated_up[down], inputs.pop(down)
        outputs[up] = product(outputs[up], vector) if up in outputs else vector
    modules = [module for module in base.projections if module in inputs or module in outputs]
    return {module: _member(inputs.get(module), outputs.get(module)) for module in modules}


def _member(input_scale: Tensor | None, output_scale: Tensor | None) -> Member:
    rotation = None if input_scale is None else Rotation(input_scale[:, None, None])
    return Member(rotation, output_scale, Bias(scaled=output_scale is not None))


def _take_vector(site: Site, is_feed_forward: bool) -> Tensor:
    shape = (1, site.projection.in_features) if is_feed_forward else (site.projection.out_features, 1)
    return site.take(VECTOR, *shape).flatten()


def _is_feed_forward(config: Ia3Config, site: Site) -> bool:
    """The shape tells the side, and must agree with PEFT's rule: `IA3Model._check_target_module_feedforward`."""
    named = _is_named(config.feedforward_modules, site.module)
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


def _is_named(names: Names | None, module: str) -> bool | None:
    """PEFT compares without a dot in front: "proj" names every module that ends in it."""
    if names is None:
        return None
    if isinstance(names, str):
        return whole_name(names).fullmatch(module) is not None
    return module.endswith(tuple(names))


METHOD = Method(name="(IA)3", peft_type="IA3", config=Ia3Config, suffixes=(VECTOR,), build=build)

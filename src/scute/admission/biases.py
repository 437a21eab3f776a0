"""The base biases that PEFT trains along with an adapter: bias = "none", "<method>_only" or "all".

A saved bias is absolute: it takes the place of the base bias. PEFT 0.21.2, `_get_learnable_bias_state_dict`.
"""

from collections.abc import Mapping

from torch import Tensor

from scute.admission.base import BaseModel
from scute.admission.sites import PREFIX, Site
from scute.admission.tensors import Tensors
from scute.algebra.form import Bias, Member
from scute.errors import Code, Refusal

NOT_SAVED = "PEFT before 0.21 trained this bias but did not save it; train again with PEFT 0.21 or with bias='none'."


def take_base_bias(site: Site, bias: str) -> Tensor | None:
    """The trained bias of an adapted projection, [out], or None if it was not trained."""
    if bias == "none" or not site.projection.has_bias:
        return None
    return site.take("base_layer.bias", site.projection.out_features, reason=NOT_SAVED if bias != "all" else "")


def bias_only_members(tensors: Tensors, sites: Mapping[str, Site], base: BaseModel) -> dict[str, Member]:
    """bias = "all" also trains the bias of every module without an adapter; norms cannot be served."""
    members = {}
    for module, projection in base.projections.items():
        if module not in sites and projection.has_bias:
            name = f"{PREFIX}{module}.bias"
            reason = "The config has bias='all', which saves every bias."
            bias = tensors.take(name, projection.out_features, reason=reason)
            members[module] = Member(bias=Bias(replaced=bias))
    other = next((name for name in tensors.names if name.endswith(".bias")), None)
    if other is not None and other.removeprefix(PREFIX).rpartition(".")[0] not in base.projections:
        tensors.reasons.add(
            Refusal(
                Code.MODULE_UNSUPPORTED,
                f"{other} is the bias of a module that is not a linear projection, and Scute serves projections only. "
                "Train with a bias setting other than 'all'.",
            )
        )
    return members

"""The projections that a config targets, by PEFT's own rules, against the sites that the file has.

PEFT only warns when the two differ, and goes on with untrained weights; here they must be the same set.
Source: `check_target_module_exists` and `_maybe_include_all_linear_layers`, peft/tuners/tuners_utils.py, 0.21.2.
"""

from collections.abc import Collection, Iterator, Sequence

from scute.admission.base import BaseModel
from scute.admission.config import AdapterConfig
from scute.admission.patterns import layer_index
from scute.admission.reasons import Reasons
from scute.admission.tensors import CONFIG_FILE, TENSOR_FILE
from scute.errors import Code, Refusal, shown

ALL_LINEAR = "all-linear"


def check_targets(config: AdapterConfig, sites: Collection[str], base: BaseModel, reasons: Reasons) -> None:
    """Refuse CONFIG_MISMATCH, TENSOR_MISSING or MODULE_UNSUPPORTED unless the config targets exactly the sites."""
    for refusal in _differences(config, sites, base):
        reasons.add(refusal)


def _differences(config: AdapterConfig, sites: Collection[str], base: BaseModel) -> Iterator[Refusal]:
    for embedding in base.embeddings:
        if is_targeted(config, embedding, base):
            yield Refusal(
                Code.MODULE_UNSUPPORTED,
                f"{CONFIG_FILE}: target_modules includes the embedding {embedding}; Scute serves projections only.",
            )
    targeted = [name for name in base.projections if is_targeted(config, name, base)]
    if not targeted:
        yield Refusal(
            Code.CONFIG_MISMATCH,
            f"{CONFIG_FILE}: target_modules = {shown(config.target_modules)} matches no linear projection of the base "
            "model. Is this the adapter's base model?",
        )
        return
    for name in targeted:
        if name not in sites:
            yield Refusal(
                Code.TENSOR_MISSING,
                f"{CONFIG_FILE} targets {name}, but {TENSOR_FILE} has no tensor for it. The save is incomplete.",
            )
    for name in sites:
        if name not in targeted:
            yield Refusal(
                Code.CONFIG_MISMATCH,
                f"{TENSOR_FILE} adapts {name}, but target_modules in {CONFIG_FILE} does not include it. "
                "PEFT would ignore these tensors.",
            )


def refuse_output_head(names: Collection[str], base: BaseModel) -> None:
    """Refuse MODULE_UNSUPPORTED if the output head is among the adapted projections: no engine of Scute adapts it."""
    if base.output_head in names:
        raise Refusal(
            Code.MODULE_UNSUPPORTED,
            f"it adapts {base.output_head}, the output head, which no engine does; train the adapter without it.",
        )


def is_targeted(config: AdapterConfig, name: str, base: BaseModel) -> bool:
    """Whether PEFT puts an adapter on the module of that name."""
    if config.exclude_modules and _matches(config, config.exclude_modules, name):
        return False
    targets = config.target_modules
    if isinstance(targets, str):
        if targets.lower() == ALL_LINEAR:
            return name in base.projections and name != base.output_head
        return _matches(config, targets, name)
    return name in targets or (_matches(config, targets, name) and _is_in_layers(config, name))


def _matches(config: AdapterConfig, names: str | list[str], name: str) -> bool:
    """A string is a regular expression for the whole name; a list holds names or their last parts."""
    if isinstance(names, str):
        return config.expressions.fullmatch(names, name) is not None
    parts = name.split(".")
    return not {".".join(parts[first:]) for first in range(len(parts))}.isdisjoint(names)


def _is_in_layers(config: AdapterConfig, name: str) -> bool:
    layers = config.layers_to_transform
    if layers is None or layers == []:
        return True
    containers: Sequence[str | None] = config.layers_pattern or [None]
    containers = [containers] if isinstance(containers, str) else containers
    found = (config.expressions.match(layer_index(container), name) for container in containers)
    match = next(filter(None, found), None)
    return match is not None and int(match["idx"]) in ([layers] if isinstance(layers, int) else layers)

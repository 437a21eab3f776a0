"""Where the normal form and the PEFT library part: projection by projection, on the inputs that PEFT has there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from scute.admission.base import BaseModel
from scute.algebra.adapted import adapted
from scute.algebra.form import AdapterForm, Member


@dataclass(frozen=True, slots=True)
class ModuleError:
    """One module. ratio: ‖normal form - PEFT‖ over ‖PEFT - base‖, of the outputs for all tokens; inf where PEFT
    changes nothing and the normal form does."""

    module: str
    ratio: float


def module_errors(
    base_model: nn.Module, peft_model: nn.Module, form: AdapterForm, base: BaseModel, prompts: Sequence[Sequence[int]]
) -> tuple[ModuleError, ...]:
    """Every adapted module, the worst first.

    base_model and peft_model: the model without and with the adapter, float32, on one device. A module is a
    projection, or the whole of a gated MLP where (IA)3's vector is on another projection than in PEFT (paper, 3.1).
    """
    inner: Any = peft_model.get_submodule("base_model.model")
    tuned = {name for name, module in inner.named_modules() if isinstance(module, BaseTunerLayer)}
    sums: dict[str, list[Tensor]] = {name: [] for name in _modules(form, base, tuned)}
    hooks = []
    for name, found in sums.items():
        members = {n: member for n, member in form.members.items() if n == name or n.startswith(f"{name}.")}
        compare = partial(_compare, base_model, name, members, found)
        hooks.append(inner.get_submodule(name).register_forward_hook(compare))
    try:
        with torch.inference_mode():
            for prompt in prompts:
                inner(input_ids=torch.tensor([list(prompt)], device=next(peft_model.parameters()).device))
    finally:
        for hook in hooks:
            hook.remove()
    return tuple(sorted((ModuleError(n, _ratio(found)) for n, found in sums.items()), key=lambda e: -e.ratio))


def _modules(form: AdapterForm, base: BaseModel, tuned: set[str]) -> list[str]:
    """The names to compare: an up projection that bears the vector of PEFT's down projection stands for its MLP."""
    moved = {up: up.rpartition(".")[0] for down, up in base.gated_up.items() if down in tuned - form.members.keys()}
    return list(dict.fromkeys(moved.get(name, name) for name in form.members))


def _compare(
    model: nn.Module,
    name: str,
    members: Mapping[str, Member],
    sums: list[Tensor],
    _: nn.Module,
    inputs: tuple[Tensor, ...],
    output: Tensor,
) -> None:
    """Adds ‖ours - PEFT‖² and ‖PEFT - base‖² of one module on the inputs that PEFT has there."""
    module, x = model.get_submodule(name), inputs[0]
    plain = module(x)
    with adapted(model, members):
        ours = module(x)
    sums.append(torch.stack([(ours - output).double().square().sum(), (output - plain).double().square().sum()]))


def _ratio(sums: list[Tensor]) -> float:
    error, effect = torch.stack(sums).sum(dim=0).sqrt().tolist()
    return error / effect if effect else (float("inf") if error else 0.0)

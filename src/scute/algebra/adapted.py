"""The normal form on a torch model: members take the place of its linear layers for as long as a block lasts."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from scute.algebra.evaluate import evaluate
from scute.algebra.form import Member, column_norms


@contextmanager
def adapted(model: nn.Module, members: Mapping[str, Member]) -> Iterator[nn.Module]:
    """The model with every named projection computed by `evaluate`; weights and modules are left alone.

    members: module name to member, as in `AdapterForm.members`. Magnitudes are resolved once, at the start. Gradients
    reach the members' tensors.
    Raises AttributeError for a name that the model does not have.
    """
    layers = [(model.get_submodule(name), member) for name, member in members.items()]
    try:
        for layer, member in layers:
            if member.magnitude is not None:
                with torch.no_grad():
                    member = member.resolve_magnitude(column_norms(weight_of(layer), member.terms))
            layer.forward = partial(_forward, layer, member)
        yield model
    finally:
        for layer, _ in layers:
            vars(layer).pop("forward", None)


def weight_of(layer: nn.Module) -> Tensor:
    """W of a linear layer, [in, out], a view; transformers' Conv1D has it that way round already."""
    weight = layer.get_parameter("weight")
    return weight if type(layer).__name__ == "Conv1D" else weight.T


def _forward(layer: nn.Module, member: Member, x: Tensor) -> Tensor:
    bias = layer.bias
    return evaluate(member, x, weight_of(layer), bias if isinstance(bias, Tensor) else None)

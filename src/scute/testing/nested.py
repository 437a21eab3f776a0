"""PEFT's layers one around the other: the reference for stacks."""

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn


def nested(base: nn.Module, folders: Sequence[Path]) -> nn.Module:
    """A copy of the base model with every adapter on it, in order.

    Each adapter's PEFT layers have those of the adapters before it as their `base_layer`, as PEFT itself nests an
    adapter of another type. A base bias that an adapter was trained with takes the place of the base model's.
    """
    model = copy.deepcopy(base)
    for folder in folders:
        adapted = PeftModel.from_pretrained(copy.deepcopy(base), str(folder)).base_model.model
        layers = {name: layer for name, layer in adapted.named_modules() if isinstance(layer, BaseTunerLayer)}
        for name, module in base.named_modules():
            if getattr(module, "bias", None) is not None:
                _take_bias(model.get_submodule(name), module, adapted.get_submodule(name))
        for name, layer in layers.items():
            layer.base_layer = model.get_submodule(name)
            model.set_submodule(name, layer)
    return model.eval()


def _take_bias(to: nn.Module, base: nn.Module, adapted: nn.Module) -> None:
    bias = _innermost(adapted).get_parameter("bias").detach()
    if not torch.equal(bias, base.get_parameter("bias")):
        _innermost(to).get_parameter("bias").data.copy_(bias)


def _innermost(module: nn.Module) -> nn.Module:
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module

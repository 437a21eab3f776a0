"""The base GEMM of a layer that only the layer itself can run (quantised, or repacked by the backend), as an operator.

Hidden from torch.compile like the other operators, so that whether an input transform is live is decided when it runs.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from scute.errors import Incompatible
from scute.kernels.routes import Route


def has_plain_weight(base_layer: Any) -> bool:
    """Whether the layer's GEMM is `F.linear` with its `weight`."""
    weight = getattr(base_layer, "weight", None)
    return type(base_layer.quant_method) is UnquantizedLinearMethod and weight is not None and weight.numel() > 0


def register(layer: Any) -> str:
    """Make a wrapped layer known to its engine's forward context; returns the key that `layer_gemm` takes.

    Raises Incompatible where two layers of the model have the same prefix.
    """
    key = f"{layer.base_layer.prefix}.scute"
    layers = get_current_vllm_config().compilation_config.static_forward_context
    if key in layers:
        raise Incompatible(f"two layers of this model are called {layer.base_layer.prefix!r}; set rotation_width to 0.")
    layers[key] = layer
    return key


def layer_gemm(x: Tensor, bias: Tensor | None, key: str, out: int) -> Tensor:
    """x [..., in] to [..., out]: one GEMM where no input transform is live, else one a slice on its own input."""
    layer: Any = get_forward_context().no_compile_layers[key]
    quant_method = layer._get_quant_method()
    if not layer.plan.is_live(Route.ROTATION):
        return quant_method.apply(layer.base_layer, x, bias)
    flat = x.flatten(0, -2) if x.ndim > 2 else x
    inputs = torch.ops.scute.rotate(flat, *layer.slots, layer.plan.buffer)
    output = x.new_empty(flat.shape[0], out)
    for index, (start, end) in enumerate(pairwise(layer.slice_starts)):
        output[:, start:end] = quant_method.apply(layer.base_layer, inputs[index], bias)[:, start:end]
    return output.view(*x.shape[:-1], out)


def _fake(x: Tensor, bias: Tensor | None, key: str, out: int) -> Tensor:  # noqa: ARG001
    return x.new_empty((*x.shape[:-1], out))


_library = torch.library.Library("scute", "FRAGMENT")
_library.define("layer_gemm(Tensor x, Tensor? bias, str key, int out) -> Tensor")
_library.impl("layer_gemm", layer_gemm, "CompositeExplicitAutograd")
torch.library.register_fake("scute::layer_gemm", _fake, lib=_library)

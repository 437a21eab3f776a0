"""DoRA's column norms from the weights as the engine holds them: sharded, fused, possibly quantised or repacked."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights

from scute.algebra.form import Member
from scute.errors import Code, Refusal

CHUNK_ELEMENTS = 1 << 22
"""Weights that are held in float64 at a time, 32 MiB: the KV cache owns most of the device memory by now."""


def _is_repacked(layer: Any) -> bool:
    """Whether the backend freed the plain weight after loading (vLLM's CPU GEMMs do)."""
    weight = getattr(layer, "weight", None)
    return isinstance(weight, Tensor) and weight.numel() == 0


def _by_identity(layer: Any) -> Tensor:
    """The weight [out, in] as what the layer's own GEMM makes of the identity, a few rows at a time."""
    size, dtype = getattr(layer, "input_size_per_partition", layer.input_size), layer.params_dtype
    height = max(1, CHUNK_ELEMENTS // size)
    parts = []
    for first in range(0, size, height):
        rows = torch.zeros(min(height, size - first), size, dtype=dtype, device=_device(layer))
        rows[torch.arange(rows.shape[0]), first + torch.arange(rows.shape[0])] = 1
        parts.append(layer.quant_method.apply(layer, rows, None))
    return torch.cat(parts).T


def _device(layer: Any) -> torch.device:
    return next(p.device for p in layer.parameters())


def dense_weight(layer: Any) -> Tensor:
    """The weight of a vLLM linear layer on this rank, [out, in], in the layer's own dtype where it is plain.

    Raises Refusal where vLLM could only recover it through a quantised activation.
    """
    if _is_repacked(layer):
        return _by_identity(layer)
    if getattr(layer, "input_scale", None) is not None and not isinstance(layer.quant_method, Fp8LinearMethod):
        raise Refusal(
            Code.MODULE_UNSUPPORTED,
            f"DoRA needs the weight of {layer.prefix}, whose quantisation has static activation scales: it cannot be "
            "recovered exactly. Serve the adapter on a base without them.",
        )
    return get_and_maybe_dequant_weights(layer, layer.params_dtype)


def square_sums(weight: Tensor, member: Member) -> Tensor:
    """Σ over this rank's inputs of (W + Σ c A B)², one for each output; [out] float64 on the CPU.

    weight: [out, in], this rank's rows and columns of one slice; member: sliced alike. Each row is summed by itself
    and in float64, so that the result does not depend on how the rows are spread over ranks.
    """
    sums = [_chunk_sums(weight, member, rows) for rows in _row_chunks(weight)]
    return torch.cat(sums).cpu()


def _row_chunks(weight: Tensor) -> Iterator[slice]:
    height = max(1, CHUNK_ELEMENTS // max(1, weight.shape[1]))
    for first in range(0, weight.shape[0], height):
        yield slice(first, min(first + height, weight.shape[0]))


def _chunk_sums(weight: Tensor, member: Member, rows: slice) -> Tensor:
    total = weight[rows].double()
    for term in member.terms:
        a, b = term.a.to(weight.device).double(), term.b[:, rows].to(weight.device).double()
        total.addmm_(b.T, a.T, alpha=term.c)
    return total.square_().sum(dim=1)

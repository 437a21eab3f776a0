"""The base projection of a layer whose fused outputs may need different inputs."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional


def sliced_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, slice_starts: list[int]) -> Tensor:
    """Project `inputs[i]` by the rows of `weight` that make slice i, one GEMM a slice.

    inputs: [slices, tokens, in]; weight: [out, in]; bias: [out] or None; slice_starts: slices + 1 rows of `weight`.
    Returns [tokens, out] in the dtype of the inputs.
    """
    if len(inputs) == 1:
        return functional.linear(inputs[0], weight, bias)
    y = inputs.new_empty(inputs.shape[1], weight.shape[0])
    for x, (start, end) in zip(inputs, pairwise(slice_starts), strict=True):
        part = weight[start:end].t()
        if bias is None:
            torch.mm(x, part, out=y[:, start:end])
        else:
            torch.addmm(bias[start:end], x, part, out=y[:, start:end])
    return y

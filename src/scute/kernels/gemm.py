"""The base projection of a layer whose fused outputs may need different inputs."""

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional


def sliced_linear(inputs: Iterable[Tensor], weight: Tensor, bias: Tensor | None, slice_starts: list[int]) -> Tensor:
    """Project the input of slice i by the rows of `weight` that make slice i, one GEMM a slice, in order.

    inputs: [tokens, in] for every slice; weight: [out, in]; bias: [out] or None; slice_starts: slices + 1 rows of
    `weight`. An input is read before the next one is asked for. Returns [tokens, out] in the dtype of the inputs.
    """
    y = None
    for x, (start, end) in zip(inputs, pairwise(slice_starts), strict=True):
        if end - start == len(weight):
            return functional.linear(x, weight, bias)
        y = x.new_empty(len(x), len(weight)) if y is None else y
        part = weight[start:end].t()
        if bias is None:
            torch.mm(x, part, out=y[:, start:end])
        else:
            torch.addmm(bias[start:end], x, part, out=y[:, start:end])
    assert y is not None
    return y

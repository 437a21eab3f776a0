"""The ops of `torch.ops.scute`: opaque to torch.compile, Triton on CUDA, plain torch on the CPU.

T: rows of the batch, padding under CUDA graphs included. slot: place of an active adapter. slice: one of the fused
outputs of a layer (q, k, v | gate, up | one). x [T, in] and y [T, out] are float16, bfloat16 or float32; dimension 1
of both is contiguous. Arithmetic is float32 and every element is rounded once, when it is written.

What the adapters own lies in one arena of bytes, in pieces that start at multiples of `UNIT_BYTES`; the table says
where. Every op ends with the same parameters.

  factors, vectors                 the arena, viewed in the dtype of x and in float32
  table [slots, slices, FIELDS]    int32, an entry for every slot and slice (`Field`); of the pieces it names,
    a [rank, in], b [rank, slice], rotation [in * width] are factors: D = R - I, element (n, i, j) of its blocks at
    n * width * width + i * width + j; scale, shift, e [slice] and d [shared rank] are vectors
  shared_a [pairs, shared_rank, max_in], shared_b [pairs, shared_rank, max_out], pair_rank [pairs] int32
  arrivals                         int32, this layer's own counters, zeros between launches (`scute.kernels.arrivals`)
  slice_starts [slices + 1], out_offsets [slices], in_offset    columns of y; where a slice starts in the columns of
    shared_b, and this layer's inputs in those of shared_a
  max_rank, rotation_width         limits; rotation_width 0 means that this layer rotates no input

  plan                             buffer of a `BatchPlan`

`linear`  [T, out]: x W^T + bias with each slice on its own rotated input, then what `adapt` does.
`adapt`   y = y * scale + shift + (x A) B + (((x A_shared) * d) B_shared) * e on the rows of adapters, in place.
`rotate`  [slices, T, in]: x R for the rows of slots that rotate the slice, a bit-exact copy of x elsewhere.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scute.kernels import reference

try:
    from scute.kernels import launch
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    launch = None  # type: ignore[assignment]

_SLOTS = (
    "Tensor factors, Tensor vectors, Tensor table, Tensor shared_a, Tensor shared_b, Tensor pair_rank,"
    " Tensor arrivals, int[] slice_starts, int[] out_offsets, int in_offset, int max_rank, int rotation_width"
)
_PLAN = "Tensor plan"
_SCHEMAS = {
    "linear": f"(Tensor x, Tensor weight, Tensor? bias, {_SLOTS}, {_PLAN}) -> Tensor",
    "adapt": f"(Tensor(a!) y, Tensor x, {_SLOTS}, {_PLAN}) -> ()",
    "rotate": f"(Tensor x, {_SLOTS}, {_PLAN}) -> Tensor",
}


def _fake_linear(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _fake_adapt(*_: object) -> None:
    return None


def _fake_rotate(x: Tensor, factors: Tensor, vectors: Tensor, table: Tensor, *_: object) -> Tensor:  # noqa: ARG001
    return x.new_empty(table.shape[1], x.shape[0], x.shape[1])


_FAKES: dict[str, Callable[..., Any]] = {"linear": _fake_linear, "adapt": _fake_adapt, "rotate": _fake_rotate}


def _register() -> torch.library.Library:
    library = torch.library.Library("scute", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, schema in _SCHEMAS.items():
        library.define(name + schema, tags=(torch.Tag.needs_fixed_stride_order,))  # type: ignore[no-untyped-call]
        library.impl(name, getattr(reference, name), "CPU")  # type: ignore[no-untyped-call]
        if launch is not None:
            library.impl(name, getattr(launch, name), "CUDA")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"scute::{name}", _FAKES[name], lib=library)
    return library


if not hasattr(torch.ops.scute, "linear"):
    _library = _register()  # the ops live as long as this object

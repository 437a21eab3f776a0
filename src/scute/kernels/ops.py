"""The ops of `torch.ops.scute`: opaque to torch.compile, Triton on CUDA, plain torch on the CPU.

T: rows of the batch, padding under CUDA graphs included. slot: place of an active adapter. slice: one of the fused
outputs of a layer (q, k, v | gate, up | one). x [T, in] and y [T, out] are float16, bfloat16 or float32, and so are
the factors; dimension 1 of both is contiguous. `rows` to `slot_of_row` and `live` are the views of a `BatchPlan`.
Arithmetic is float32 and every element is rounded once, when it is written.

  a [slices, factor_rows, in], b [factor_rows, out]  rank-major factors; slot j owns the rows from row_start[j] on
  row_start [slots], slice_starts [slices + 1], out_offsets [slices], pair_rank [pairs]  int32
  table [slots, slices, 2]                           int32 (rank, `Flag`s)
  scale, shift, e [slots, out]; d [slots, slices, shared_rank]  float32, read only where the flags say so
  shared_a [pairs, shared_rank, max_in]; shared_b [pairs, shared_rank, max_out]  factors of the shared pairs
  rotation [slots, slices, in * max_width]           D = R - I; element (n, i, j) at n * w * w + i * w + j
  width [slots, slices]                              int32 block width w, which divides `in`; 0 for no rotation

`low_rank`     y = y * scale + shift + (x A) B on the rows and slices of adapters that have any of the three.
`shared`       y += (((x A) * d) B) * e, the pair's A from column `in_offset` and B from column `out_offsets[i]`.
`rotate`       [slices, T, in]: x R for the rows of slots that rotate the slice, a bit-exact copy of x elsewhere.
`base_linear`  [T, out]: x W^T + bias, every slice on its own rotated input where the plan holds a rotation.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scute.kernels import reference

try:
    from scute.kernels import lowrank, rotate, shared
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    _on_cuda: dict[str, Callable[..., Any]] = {}
else:
    _on_cuda = {
        "low_rank": lowrank.low_rank,
        "shared": shared.shared,
        "rotate": rotate.rotate,
        "base_linear": rotate.base_linear,
    }

_PLAN = "Tensor rows, Tensor tiles_small, Tensor tiles_large, Tensor live"
_SCHEMAS = {
    "low_rank": (
        "(Tensor(a!) y, Tensor x, Tensor a, Tensor b, Tensor row_start, Tensor table, Tensor scale, Tensor shift,"
        f" Tensor slice_starts, int max_slice, int max_rank, {_PLAN}) -> ()"
    ),
    "shared": (
        "(Tensor(a!) y, Tensor x, Tensor shared_a, Tensor shared_b, Tensor pair_rank, Tensor d, Tensor e, Tensor table,"
        " Tensor slice_starts, Tensor out_offsets, int max_slice, int in_offset, Tensor shared_rows,"
        " Tensor shared_tiles_small, Tensor shared_tiles_large, Tensor slot_of_row, Tensor live) -> ()"
    ),
    "rotate": f"(Tensor x, Tensor rotation, Tensor width, int max_width, {_PLAN}) -> Tensor",
    "base_linear": (
        "(Tensor x, Tensor weight, Tensor? bias, int[] slice_starts_host, Tensor rotation, Tensor width,"
        f" int max_width, {_PLAN}) -> Tensor"
    ),
}


def _fake_mutation(*_: object) -> None:
    return None


def _fake_rotate(x: Tensor, rotation: Tensor, *_: object) -> Tensor:
    return x.new_empty(rotation.shape[1], x.shape[0], x.shape[1])


def _fake_base_linear(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


_FAKES: dict[str, Callable[..., Any]] = {
    "low_rank": _fake_mutation,
    "shared": _fake_mutation,
    "rotate": _fake_rotate,
    "base_linear": _fake_base_linear,
}


def _register() -> torch.library.Library:
    library = torch.library.Library("scute", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, schema in _SCHEMAS.items():
        library.define(name + schema, tags=(torch.Tag.needs_fixed_stride_order,))  # type: ignore[no-untyped-call]
        library.impl(name, getattr(reference, name), "CPU")  # type: ignore[no-untyped-call]
        if name in _on_cuda:
            library.impl(name, _on_cuda[name], "CUDA")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"scute::{name}", _FAKES[name], lib=library)
    return library


if not hasattr(torch.ops.scute, "low_rank"):
    _library = _register()  # the ops live as long as this object

"""What the launches of all kernels have in common."""

from itertools import pairwise

import torch
from torch import Tensor

from scute.kernels.arguments import Slots


def column_blocks(slots: Slots, width: int) -> int:
    """Blocks of `width` columns that the slices of a layer are cut into, slice by slice."""
    return sum(-(-(end - start) // width) for start, end in pairwise(slots.slice_starts))


def are_aligned(slots: Slots) -> bool:
    """Whether slices start at multiples of 16: only then may the compiler make wide loads and stores of them."""
    return all(start % 16 == 0 for start in (*slots.slice_starts, *slots.out_offsets))


def unit_width(slots: Slots) -> int:
    """The widest rotation block, if matrix units can multiply blocks of this width one by one, else 0."""
    return slots.rotation_width if slots.rotation_width in (16, 32, 64) else 0


def launch_options(x: Tensor) -> dict[str, bool]:
    """Programmatic dependent launch: a kernel starts while the one before it ends."""
    return {"PDL": True, "launch_pdl": True} if is_hopper(x) else {"PDL": False}


def is_hopper(x: Tensor) -> bool:
    """Hopper or later: it has programmatic dependent launch, and shared memory for a deep GEMM."""
    return x.is_cuda and torch.version.cuda is not None and torch.cuda.get_device_capability(x.device)[0] >= 9

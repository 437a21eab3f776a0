"""What the launches of all kernels have in common."""

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from scute.kernels.arguments import Slots
from scute.kernels.blocks import ceil_div
from scute.kernels.plan import BatchPlan
from scute.kernels.routes import Route


def column_blocks(slots: Slots, width: int) -> int:
    """Blocks of `width` columns that the slices of a layer are cut into, slice by slice."""
    return _column_blocks(tuple(slots.slice_starts), width)


def are_aligned(slots: Slots) -> bool:
    """Whether slices start at multiples of 16: only then may the compiler make wide loads and stores of them."""
    return _are_aligned((*slots.slice_starts, *slots.out_offsets))


# A prefill step that is not in a graph asks both several times a layer.
@cache
def _column_blocks(starts: tuple[int, ...], width: int) -> int:
    return sum(ceil_div(end - start, width) for start, end in pairwise(starts))


@cache
def _are_aligned(starts: tuple[int, ...]) -> bool:
    return all(start % 16 == 0 for start in starts)


def unit_width(slots: Slots) -> int:
    """The widest rotation block, if matrix units can multiply blocks of this width one by one, else 0."""
    return slots.rotation_width if slots.rotation_width in (16, 32, 64) else 0


def shared_rank_of(slots: Slots, plan: BatchPlan) -> int:
    """The most ranks of a shared pair; 0 where no row needs one: then no kernel reads any."""
    return slots.shared_a.shape[1] if plan.is_live(Route.SHARED) else 0


def shared_a_of(slots: Slots) -> Tensor:
    """The columns of the shared factors that are this layer's inputs."""
    return slots.shared_a[:, :, slots.in_offset :] if slots.in_offset else slots.shared_a


def launch_options(x: Tensor) -> dict[str, bool]:
    """Programmatic dependent launch: a kernel starts while the one before it ends."""
    return {"PDL": True, "launch_pdl": True} if is_hopper(x) else {"PDL": False}


def has_room(x: Tensor) -> bool:
    """Whether a program has the shared memory that large blocks need; the interpreter has any."""
    return not x.is_cuda or is_roomy(x)


def is_roomy(x: Tensor) -> bool:
    """A GPU whose programs have 227 KiB: Hopper, and Blackwell of data centres. Others have 99 to 163."""
    return x.is_cuda and _is_roomy(x.get_device())


def is_hopper(x: Tensor) -> bool:
    """Hopper or later: it has programmatic dependent launch."""
    return x.is_cuda and _is_hopper(x.get_device())


@cache
def _is_roomy(device: int) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] in (9, 10)


@cache
def _is_hopper(device: int) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] >= 9

"""The parameters that every op has in common (`scute.kernels.ops` documents each)."""

from typing import NamedTuple, cast

from torch import Tensor

from scute.kernels.plan import BatchPlan, plan_of


class Slots(NamedTuple):
    """The slots of one layer."""

    factors: Tensor
    vectors: Tensor
    table: Tensor
    shared_a: Tensor
    shared_b: Tensor
    pair_rank: Tensor
    arrivals: Tensor
    slice_starts: list[int]
    out_offsets: list[int]
    in_offset: int
    max_rank: int
    rotation_width: int

    @property
    def slices(self) -> int:
        return len(self.out_offsets)


def unpack(arguments: tuple[object, ...]) -> tuple[Slots, BatchPlan]:
    """What every op ends with: the slots' parameters, and the buffer of a plan."""
    *slots, buffer = arguments
    return Slots._make(slots), plan_of(cast("Tensor", buffer))

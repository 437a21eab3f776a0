"""The parameters that every op has in common, as records (`scute.kernels.ops` documents each)."""

from typing import NamedTuple

from torch import Tensor

from scute.kernels.routes import Part, Route


class Slots(NamedTuple):
    """The slots of one layer."""

    factors: Tensor
    vectors: Tensor
    table: Tensor
    shared_a: Tensor
    shared_b: Tensor
    pair_rank: Tensor
    slice_starts: list[int]
    out_offsets: list[int]
    in_offset: int
    max_rank: int
    rotation_width: int

    @property
    def slices(self) -> int:
        return len(self.out_offsets)


class Plan(NamedTuple):
    """The plan of one step."""

    buffer: Tensor
    offsets: list[int]
    live: Tensor

    def tiles(self, route: Route, bound: int) -> int:
        """Tiles that a launch of the route has to cover; bound: the most that its rows could have."""
        return min(bound, int(self.live.tolist()[route]))

    def is_live(self, route: Route) -> bool:
        """Read when the op runs: the values change from step to step."""
        return bool(self.live.tolist()[route])

    def part(self, part: Part) -> Tensor:
        """One list of the plan, int32, flat."""
        end = self.offsets[part + 1] if part + 1 < len(self.offsets) else len(self.buffer)
        return self.buffer[self.offsets[part] : end]


def unpack(arguments: tuple[object, ...]) -> tuple[Slots, Plan]:
    """The two groups of parameters that every op ends with."""
    count = len(Slots._fields)
    return Slots._make(arguments[:count]), Plan._make(arguments[count:])

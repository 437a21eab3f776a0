"""Numbers that the host writes and the kernels read: the routes of a step and the flags of a table entry."""

from enum import IntEnum, IntFlag


class Route(IntEnum):
    """Index into `BatchPlan.live`: which passes the rows of this step need (paper, section 4.1)."""

    LOW_RANK = 0
    SHARED = 1
    ROTATION = 2


class Flag(IntFlag):
    """Bits of `table[slot, slice, 1]`: which slots of the normal form the adapter has on that slice."""

    SCALE = 1
    SHIFT = 2
    SHARED = 4
    ROTATION = 8

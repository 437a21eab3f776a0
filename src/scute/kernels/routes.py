"""Numbers that host and kernels agree on: routes, the fields of the table, the parts of the plan, sizes of batches."""

from enum import IntEnum, IntFlag

UNIT_BYTES = 128
"""Offsets in the table count units of this size, so that 32 bits reach every byte of a GPU."""

FIELDS = 16
"""Columns of the table: an entry is one line of 64 bytes."""

SMALL_BATCH = 256
"""Most rows of a batch that is served as one of decode: small tiles waste less where every adapter has few rows."""
FUSED_GEMM_TOKENS = 64
"""Most rows for which one GEMM over all slices beats one a slice, where the GPU has it."""
TOGETHER_TOKENS = 1024
"""Most rows for which a copy of x a slice costs less than the launches that one copy for all of them needs."""


def units_of(num_bytes: int) -> int:
    """Units of the arena that a piece of this size takes; every piece starts at a unit."""
    return -(-num_bytes // UNIT_BYTES)


class Route(IntEnum):
    """Index into `BatchPlan.live`: which passes the rows of this step need (paper, section 4.1)."""

    LOW_RANK = 0
    SHARED = 1
    ROTATION = 2


class Field(IntEnum):
    """Columns of a table entry; A to ROTATION are offsets into the arena, in units of `UNIT_BYTES`.

    PAIR: place of the shared pair that the slice uses, where it has `Flag.SHARED`.
    """

    RANK = 0
    FLAGS = 1
    A = 2
    B = 3
    SCALE = 4
    SHIFT = 5
    D = 6
    E = 7
    ROTATION = 8
    WIDTH = 9
    PAIR = 10


class Flag(IntFlag):
    """Bits of `Field.FLAGS`: which slots of the normal form the adapter has on that slice."""

    SCALE = 1
    SHIFT = 2
    SHARED = 4
    ROTATION = 8


class Part(IntEnum):
    """Index into `BatchPlan.offsets`: the lists that make up the plan."""

    ROWS = 0
    SLOT_OF_ROW = 1
    SHARED_ROWS = 2
    TILES_SMALL = 3
    TILES_LARGE = 4
    SHARED_TILES_SMALL = 5
    SHARED_TILES_LARGE = 6
    SHRINK_SMALL = 7
    SHRINK_LARGE = 8
    ROTATED_SMALL = 9
    ROTATED_LARGE = 10

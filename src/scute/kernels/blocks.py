"""Block sizes of the kernels, from shapes alone."""

from typing import NamedTuple

from scute.kernels.plan import SMALL_TILE

WARPS = 4
SHRINK_STAGES = 3
# On Hopper, ptxas miscompiles a pipelined wgmma whose A operand is in registers (triton#9433), as the expand has it.
EXPAND_STAGES = 1


class Blocks(NamedTuple):
    """rank, inner, outer: block of the rank, of the columns of x, of the columns of y.

    splits, split_width: how many programs share the sum over the columns of x, and the columns of each.
    """

    rank: int
    inner: int
    outer: int
    splits: int
    split_width: int


def choose_blocks(height: int, in_features: int, max_rank: int, element_size: int) -> Blocks:
    """Blocks for tiles of `height` rows.

    The splits depend on the tile height alone, not on the number of rows, and so does the order of a row's sum.
    """
    small = height == SMALL_TILE
    rank = 16 if max_rank <= 16 else 32 if max_rank <= 32 else 64
    inner = (256 if small else 128) // element_size
    splits = min(16, _ceil_div(in_features, 256)) if small else min(4, _ceil_div(in_features, 1024))
    split_width = _ceil_div(_ceil_div(in_features, splits), inner) * inner
    return Blocks(rank, inner, 128, _ceil_div(in_features, split_width), split_width)


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)

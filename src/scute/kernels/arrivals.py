"""Counters of programs that share out a sum: the one that arrives last adds it up.

Every layer has its own, because layers may run side by side: vLLM runs shared experts on a stream of their own.
"""

import torch
from torch import Tensor

from scute.kernels.blocks import ceil_div, round_up
from scute.kernels.plan import ALIGNED, PAIR_CHUNK, SMALL_TILE, tile_count
from scute.kernels.routes import SMALL_BATCH

NARROWEST = 32
"""Columns of a block of the base GEMM at least; with narrower ones, nothing is shared out."""


def arrivals_of(slices: int, out: int, shared_a: Tensor) -> Tensor:
    """Counters of a layer, all zero between launches: for pairs first, then for blocks of its base GEMM.

    slices, out: its outputs; shared_a [pairs, rank, in]: as its ops are given it. Returns int32 beside it.
    """
    blocks = ceil_div(out, NARROWEST) + slices if slices > 1 else 0
    return torch.zeros(_of_pairs(shared_a) + blocks, dtype=torch.int32, device=shared_a.device)


def gemm_part(arrivals: Tensor, shared_a: Tensor) -> Tensor:
    """Those of the base GEMM."""
    return arrivals[_of_pairs(shared_a) :]


def _of_pairs(shared_a: Tensor) -> int:
    """One for every chunk of ranks of every tile that a small batch can have."""
    pairs, shared_rank, _ = shared_a.shape
    return round_up(tile_count(SMALL_BATCH, SMALL_TILE, pairs) * ceil_div(shared_rank, PAIR_CHUNK), ALIGNED)

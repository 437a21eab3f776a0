"""Kernels that a layer of a step launches beside its base GEMM, by what the batch needs anywhere in the model."""

from collections.abc import Set

from scute.costs.layers import LayerShape
from scute.costs.traffic import Route

# The bounds are those of scute.kernels; a test holds them equal.
SMALL_BATCH = 256
"""Most rows of a decode batch."""
FUSED_GEMM_TOKENS = 64
"""Most rows for which a Hopper GPU projects rotated slices in one GEMM."""
TOGETHER_TOKENS = 1024
"""Most rows whose slices are rotated in one launch."""

STOCK_LAUNCHES = 3
"""vLLM 0.33's LoRA: zeros for the shrink's sums, shrink, expand."""


def launches(shape: LayerShape, live: Set[Route], rows: int, fuses_gemm: bool) -> int:
    """Launches that Scute adds to a layer. fuses_gemm: whether the GPU is a Hopper."""
    if not rows or not live:
        return 0
    decode, adapts = rows <= SMALL_BATCH, bool(live - {Route.ROTATION})
    count = 2 * adapts  # shrink, expand
    if Route.SHARED in live and not decode:
        count += 2  # partial sums of pairs, and their expand
    if Route.ROTATION in live:
        if not (decode and adapts):  # the shrink of a decode batch rotates, too
            count += 1 + (1 if rows <= TOGETHER_TOKENS else len(shape.slices))  # copy of x, rotations
        if not (fuses_gemm and rows <= FUSED_GEMM_TOKENS):
            count += len(shape.slices) - 1  # a GEMM a slice
    return count

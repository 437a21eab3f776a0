"""Kernels that a layer of a step launches beside its base GEMM, by what the batch needs anywhere in the model."""

from collections.abc import Set

from scute.costs.layers import LayerShape
from scute.costs.traffic import Route
from scute.kernels.routes import FUSED_GEMM_TOKENS, SMALL_BATCH, TOGETHER_TOKENS

STOCK_LAUNCHES = 3
"""vLLM 0.33's LoRA: zeros for the shrink's sums, shrink, expand."""


def launches(shape: LayerShape, live: Set[Route], rows: int, fuses_gemm: bool) -> int:
    """Launches that Scute adds to a layer. fuses_gemm: whether the GPU projects rotated slices in one GEMM."""
    if not rows or not live:
        return 0
    decode = rows <= SMALL_BATCH
    count = 2 if decode or Route.LOW_RANK in live else 1  # a graph has the shrink, whatever the adapters have
    if Route.SHARED in live and not decode:
        count += 3  # the pairs' shrink, its end, and their expand
    if Route.ROTATION in live:
        fused = fuses_gemm and rows <= FUSED_GEMM_TOKENS and len(shape.slices) > 1
        if not decode and rows > TOGETHER_TOKENS:
            count += len(shape.slices)  # a rotation a slice, the first with a copy of x
        elif not decode or fused:
            count += 1  # one rotation for all slices; in other decode batches the shrink rotates, too
        if not fused:
            count += len(shape.slices) - 1  # a GEMM a slice
    return count

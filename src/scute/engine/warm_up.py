"""Runs every kernel that a batch may need once, so that no request waits for a compiler.

vLLM's own warm-up makes every route live, and captures graphs of small batches alone: a large batch without shared
pairs would compile its kernels when it comes.
"""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from vllm.logger import init_logger

from scute.engine.graphs import Routes
from scute.engine.layers import ScuteLinear
from scute.kernels.plan import RANKS, SMALL_TILE, UNBOUNDED, size_class, tile_height
from scute.kernels.sizes import gemm_blocks

if TYPE_CHECKING:
    from scute.engine.model_manager import ScuteModelManager

logger = init_logger("vllm.scute")


class Kind(NamedTuple):
    """All of a layer that its kernels are compiled for.

    routes: those it can serve. weight_stride: None where only the layer itself can run its GEMM.
    """

    inputs: int
    slice_starts: tuple[int, ...]
    out_offsets: tuple[int, ...]
    in_offset: int
    routes: Routes
    weight_stride: int | None
    has_bias: bool

    @classmethod
    def of(cls, layer: Any) -> "Kind":
        slots = layer.slots
        return cls(
            layer.input_size,
            tuple(slots.slice_starts),
            tuple(slots.out_offsets),
            slots.in_offset,
            Routes.SHARED * (layer.pairs is not None) | Routes.ROTATION * (layer.rotation_width > 0),
            layer.base_layer.weight.stride(0) if layer.has_plain_weight else None,
            _bias_of(layer) is not None,
        )


class Batch(NamedTuple):
    """How many rows it has, what its adapters need, and their largest rank."""

    rows: int
    routes: Routes
    ranks: int


def batches(kind: Kind, max_rows: int, element_size: int) -> Iterator[Batch]:
    """The smallest for each kernel that the layer may need in batches of at most `max_rows` rows."""
    smallest: dict[Any, int] = {}
    for rows in [1, *(2**power + 1 for power in range(max_rows.bit_length()))]:  # where rules change their answers
        if rows <= max_rows:
            smallest.setdefault((size_class(rows), gemm_blocks(rows, kind.slice_starts[-1], element_size)), rows)
    for rows in smallest.values():
        # Small tiles have one kernel for all ranks, large ones another where all ranks are small.
        for ranks in (UNBOUNDED,) if tile_height(rows) == SMALL_TILE else (1, UNBOUNDED):
            for routes in sorted({kind.routes & chosen for chosen in range(Routes.EVERY + 1)}):
                yield Batch(rows, Routes(routes), ranks)


def run(manager: "ScuteModelManager") -> None:
    """Before the first step: the plan is empty then, so that programs end at once, whatever the slots hold."""
    start = time.perf_counter()
    plan = manager.plan
    before = plan.live.clone()
    layers = {Kind.of(layer): layer for layer in manager.modules.values() if isinstance(layer, ScuteLinear)}
    try:
        for kind, layer in layers.items():
            for batch in batches(kind, plan.max_tokens, layer.slots.factors.element_size()):
                plan.live.fill_(UNBOUNDED)
                plan.live[RANKS] = batch.ranks
                manager.force_routes(shared=Routes.SHARED in batch.routes, rotation=Routes.ROTATION in batch.routes)
                _run(layer, batch)
    finally:
        plan.live.copy_(before)
    if plan.buffer.is_cuda:  # torch keeps one for every stream, and vLLM's steps may run on another
        torch._C._cuda_clearCublasWorkspaces()
    # vLLM empties torch's cache before it measures; here that would fail in its memory pool for sleep mode.
    logger.info("Kernels for %d kinds of layer are ready after %.1f s", len(layers), time.perf_counter() - start)


@torch.no_grad()
def _run(layer: Any, batch: Batch) -> None:
    """What the layer does with a batch, on rows of zeros."""
    factors, arguments = layer.slots.factors, (*layer.slots, layer.plan.buffer)
    x = torch.zeros(batch.rows, layer.input_size, dtype=factors.dtype, device=factors.device)
    if layer.has_plain_weight:  # which vLLM may keep on the host between forwards
        weight, bias = layer.base_layer.weight.to(x.device), _bias_of(layer)
        torch.ops.scute.linear(x, weight, None if bias is None else bias.to(x.device), *arguments)
        return
    if Routes.ROTATION in batch.routes:
        torch.ops.scute.rotate(x, *arguments)
    torch.ops.scute.adapt(x.new_zeros(batch.rows, layer.slots.slice_starts[-1]), x, *arguments)


def _bias_of(layer: Any) -> Tensor | None:
    """As vLLM hands it to the GEMM of a layer whose outputs the ranks share out; that of another has one slice."""
    base_layer = layer.base_layer
    return None if getattr(base_layer, "skip_bias_add", False) else getattr(base_layer, "bias", None)

"""How large the arena of a rank is, and whether every batch that vLLM may schedule fits it."""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from vllm.config.lora import LoRAConfig

from scute.admission.methods.lora import MAX_RANK
from scute.engine.pieces import SliceSlots
from scute.kernels.routes import units_of

DUMMY_RANK = 8
"""Largest rank of a warm-up dummy, as vLLM makes them."""
LEAST_SHARE = 64
"""Without a --max-lora-rank, one part in so many of the engine's memory is for adapters, if not more."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """A wrapped layer on one rank. slices: its outputs; rotates, shares: whether an R, a shared pair can be served."""

    inputs: int
    slices: Sequence[int]
    rotates: bool
    shares: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """What one adapter may be. rotation_width, shared_rank: 0 where the route is switched off.

    rank: the largest. usual_rank: what the default size of the arena is for.
    """

    rank: int
    usual_rank: int
    rotation_width: int
    shared_rank: int
    dtype: torch.dtype

    def largest_adapter(self, layers: Iterable[LayerShape]) -> int:
        """Units that any adapter of one method takes at most, one of LoRA at the usual rank.

        These are A and B or else R at the largest width, and two vectors of every output: s and,
        where the layer or the adapter has a bias, b; or e of VeRA, which also has d.
        """
        factors = rotations = vectors = 0
        for layer in layers:
            for out in layer.slices:
                factors += self._factors(self.usual_rank, layer.inputs, out).units
                vectors += SliceSlots(scale=_shape(out), shift=_shape(out)).units
                if layer.rotates and self.rotation_width:
                    rotation = _shape(layer.inputs * self.rotation_width, dtype=self.dtype)
                    rotations += SliceSlots(rotation=rotation).units
                if layer.shares and self.shared_rank:
                    vectors += SliceSlots(d=_shape(self.shared_rank)).units
        return max(factors, rotations) + vectors

    @property
    def dummy_rank(self) -> int:
        return min(self.usual_rank, DUMMY_RANK)

    def largest_dummy_piece(self, layers: Iterable[LayerShape]) -> int:
        """Units of the largest factor of a warm-up dummy."""
        sizes = (max(layer.inputs, *layer.slices) for layer in layers)
        return units_of(self.dummy_rank * max(sizes, default=0) * self.dtype.itemsize)

    def _factors(self, rank: int, inputs: int, out: int) -> SliceSlots:
        return SliceSlots(a=_shape(rank, inputs, dtype=self.dtype), b=_shape(rank, out, dtype=self.dtype))


def largest_rank(max_lora_rank: int) -> int:
    """Of an adapter. vLLM cannot say whether the flag was given: its default is no limit, any other value is one."""
    return MAX_RANK if max_lora_rank == LoRAConfig().max_lora_rank else max_lora_rank


def largest_batch(units: Iterable[int], slots: int) -> int:
    """Units that the adapters of one batch take at most: those of the largest `slots` of them."""
    return sum(heapq.nlargest(slots, units))


def _shape(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")

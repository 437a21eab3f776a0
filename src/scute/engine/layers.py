"""vLLM's linear LoRA layers with Scute's slots: subclasses that do their work with Scute's operators."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.config.lora import LoRAConfig
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)

import scute.kernels.ops  # noqa: F401  registers torch.ops.scute
from scute.engine import layer_gemm
from scute.engine.arena import Arena
from scute.engine.capacity import LayerShape, Limits
from scute.engine.layer_gemm import has_plain_weight
from scute.engine.pairs import SharedPairs
from scute.engine.placement import input_range, output_offsets
from scute.kernels.arguments import Slots
from scute.kernels.arrivals import arrivals_of
from scute.kernels.plan import BatchPlan

TRANSFORMABLE = (ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear)
"""Base layers whose forward is one GEMM that Scute may run on transformed inputs."""


class ScuteLinear:
    """Mixed into every linear LoRA class of vLLM, before it.

    slots, plan: what the operators of this layer take. first_slice: where its slices start in the arena's table.
    """

    slots: Slots
    plan: BatchPlan
    first_slice: int
    part_sizes: tuple[int, ...]
    slice_starts: list[int]
    rotation_width: int
    pairs: SharedPairs | None

    def create_lora_weights(self: Any, max_loras: int, lora_config: LoRAConfig, model_config: Any = None) -> None:
        """Keep vLLM's stacks as shapes without memory: the arena takes their place."""
        device, self.device = self.device, torch.device("meta")
        super().create_lora_weights(max_loras, lora_config, model_config)  # type: ignore[misc]
        self.device = device

    def prepare(self: Any, first_slice: int, parts: Sequence[int], limits: Limits, pairs: SharedPairs | None) -> None:
        """Work out what this layer can serve. parts: full output size of each projection that is fused into it."""
        offsets = output_offsets(self, parts) if pairs is not None else None
        self.first_slice, self.part_sizes = first_slice, tuple(parts)
        self.pairs = pairs if offsets is not None else None
        self.out_offsets = offsets or [0] * len(self.output_slices)
        self.slice_starts = [0, *itertools.accumulate(self.output_slices)]
        self.rotation_width = limits.rotation_width if self.accepts_rotation else 0
        self.has_plain_weight = has_plain_weight(self.base_layer)
        if self.rotation_width and not self.has_plain_weight:
            self.gemm_key = layer_gemm.register(self)

    @property
    def shape(self: Any) -> LayerShape:
        rotates, shares = bool(self.rotation_width), self.pairs is not None
        return LayerShape(self.input_size, self.output_slices, rotates, shares)

    def connect(self: Any, arena: Arena, plan: BatchPlan, limits: Limits) -> None:
        """Bind the operators to the arena, whose size follows from the shapes of all layers."""
        none = torch.zeros(0, 0, 0, dtype=limits.dtype, device=arena.memory.device)
        empty = torch.zeros(0, dtype=torch.int32, device=arena.memory.device)
        pairs = self.pairs
        self.slots = Slots(
            arena.memory.view(limits.dtype),
            arena.memory.view(torch.float32),
            arena.table[:, self.first_slice : self.first_slice + len(self.output_slices)],
            none if pairs is None else pairs.a,
            none if pairs is None else pairs.b,
            empty if pairs is None else pairs.rank,
            arrivals_of(len(self.output_slices), self.slice_starts[-1], none if pairs is None else pairs.a),
            self.slice_starts,
            self.out_offsets,
            input_range(self)[0],
            limits.rank,
            self.rotation_width,
        )
        self.plan = plan

    @property
    def accepts_rotation(self: Any) -> bool:
        """Whether an input transform can be served here."""
        return type(self.base_layer) in TRANSFORMABLE

    def _apply_sync(self: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.has_plain_weight:
            flat = x.flatten(0, -2) if x.ndim > 2 else x
            output = torch.ops.scute.linear(flat, self.base_layer.weight, bias, *self.slots, self.plan.buffer)
            return output.view(*x.shape[:-1], -1) if x.ndim > 2 else output
        if self.rotation_width:
            output = torch.ops.scute.layer_gemm(x, bias, self.gemm_key, self.slice_starts[-1])
        else:
            output = self._get_quant_method().apply(self.base_layer, x, bias)
        return self._apply_lora_to_output(x, output)

    def _apply_lora_to_output(self: Any, x: Tensor, output: Tensor) -> Tensor:
        shape = output.shape
        if output.ndim > 2:
            x, output = x.flatten(0, -2), output.flatten(0, -2)
        torch.ops.scute.adapt(output, x, *self.slots, self.plan.buffer)
        return output.view(shape)


def scute_classes(classes: Iterable[type[BaseLayerWithLoRA]]) -> tuple[type[BaseLayerWithLoRA], ...]:
    """The same tuple with every linear class replaced by its Scute subclass, importable from this module."""
    return tuple(_subclass(c) if issubclass(c, BaseLinearLayerWithLoRA) else c for c in classes)


def _subclass(base: type[BaseLinearLayerWithLoRA]) -> type[BaseLinearLayerWithLoRA]:
    name = f"Scute{base.__name__}"
    made = type(name, (ScuteLinear, base), {"__module__": __name__, "__qualname__": name, "__doc__": base.__doc__})
    globals()[name] = made  # torch.compile's artifacts name classes by import path
    return made

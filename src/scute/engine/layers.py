"""vLLM's linear LoRA layers with Scute's slots: subclasses that do their work with Scute's operators."""

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
from scute.engine.layer_gemm import has_plain_weight
from scute.engine.placement import input_range, output_offsets
from scute.engine.slots import LayerSlots, SharedPairs, Sizes, SliceSlots
from scute.kernels.plan import BatchPlan

TRANSFORMABLE = (ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear)
"""Base layers whose forward is one GEMM that Scute may run on transformed inputs."""


class ScuteLinear:
    """Mixed into every linear LoRA class of vLLM, before it."""

    slots: LayerSlots
    plan: BatchPlan
    row_start: Tensor
    pairs: SharedPairs | None

    def create_lora_weights(self: Any, max_loras: int, lora_config: LoRAConfig, model_config: Any = None) -> None:
        """Keep vLLM's stacks as shapes without memory; the slots are allocated in their place by `allocate`."""
        device, self.device = self.device, torch.device("meta")
        super().create_lora_weights(max_loras, lora_config, model_config)  # type: ignore[misc]
        self.device = device

    def allocate(
        self: Any, sizes: Sizes, row_start: Tensor, pairs: SharedPairs | None, parts: Sequence[int], plan: BatchPlan
    ) -> None:
        """Allocate the slots. parts: full output size of each projection that is fused into this layer."""
        offsets = output_offsets(self, parts) if pairs is not None else None
        self.part_sizes = tuple(parts)
        self.slots = LayerSlots(sizes, self.input_size, self.output_slices, has_shared=offsets is not None)
        self.plan, self.row_start, self.max_rank = plan, row_start, sizes.max_rank
        self.pairs = pairs if offsets is not None else None
        self.shared_in_offset = input_range(self)[0]
        self.shared_out_offsets = torch.tensor(offsets or [0], dtype=torch.int32, device=sizes.device)
        self.rotation_width = sizes.rotation_width if self.accepts_rotation else 0
        self.has_plain_weight = has_plain_weight(self.base_layer)
        if self.rotation_width and not self.has_plain_weight:
            self.gemm_key = layer_gemm.register(self)

    @property
    def accepts_rotation(self: Any) -> bool:
        """Whether an input transform can be served here."""
        return type(self.base_layer) in TRANSFORMABLE

    def reset_lora(self, index: int) -> None:
        self.slots.clear(index)

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:  # noqa: ARG002
        """What vLLM calls with the zeros of a warm-up dummy, or with a placeholder that `set_slots` follows.

        Only the rank matters: kernels then run as long as they would for an adapter, on whatever the slot holds.
        """
        parts = lora_a if isinstance(lora_a, list | tuple) else [lora_a]
        self.slots.mark(index, rank=max((a.shape[0] for a in parts if a is not None), default=0))

    def set_slots(self, index: int, pieces: Sequence[SliceSlots | None]) -> None:
        """An adapter's slots, one piece a slice of this layer, sliced and cast by `scute.engine.packing`."""
        self.slots.write(index, pieces)

    def _apply_sync(self: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if not self.rotation_width:
            output = self._get_quant_method().apply(self.base_layer, x, bias)
        elif self.has_plain_weight:
            output = self._transformed_gemm(x, bias)
        else:
            output = torch.ops.scute.layer_gemm(x, bias, self.gemm_key, sum(self.output_slices))
        return self._apply_lora_to_output(x, output)

    def _transformed_gemm(self: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        slots, plan = self.slots, self.plan
        flat = x.flatten(0, -2) if x.ndim > 2 else x
        output = torch.ops.scute.base_linear(
            flat, self.base_layer.weight, bias, slots.starts, slots.rotation, slots.width, self.rotation_width,
            plan.rows, plan.tiles_small, plan.tiles_large, plan.live,
        )  # fmt: skip
        return output.view(*x.shape[:-1], -1) if x.ndim > 2 else output

    def _apply_lora_to_output(self: Any, x: Tensor, output: Tensor) -> Tensor:
        slots, plan, shape = self.slots, self.plan, output.shape
        if output.ndim > 2:
            x, output = x.flatten(0, -2), output.flatten(0, -2)
        torch.ops.scute.low_rank(
            output, x, slots.a, slots.b, self.row_start, slots.table, slots.scale, slots.shift,
            slots.slice_starts, slots.max_slice, self.max_rank,
            plan.rows, plan.tiles_small, plan.tiles_large, plan.live,
        )  # fmt: skip
        if self.pairs is not None:
            torch.ops.scute.shared(
                output, x, self.pairs.a, self.pairs.b, self.pairs.rank, slots.d, slots.e, slots.table,
                slots.slice_starts, self.shared_out_offsets, slots.max_slice, self.shared_in_offset,
                plan.shared_rows, plan.shared_tiles_small, plan.shared_tiles_large, plan.slot_of_row, plan.live,
            )  # fmt: skip
        return output.view(shape)


def scute_classes(classes: Iterable[type[BaseLayerWithLoRA]]) -> tuple[type[BaseLayerWithLoRA], ...]:
    """The same tuple with every linear class replaced by its Scute subclass, importable from this module."""
    return tuple(_subclass(c) if issubclass(c, BaseLinearLayerWithLoRA) else c for c in classes)


def _subclass(base: type[BaseLinearLayerWithLoRA]) -> type[BaseLinearLayerWithLoRA]:
    name = f"Scute{base.__name__}"
    made = type(name, (ScuteLinear, base), {"__module__": __name__, "__qualname__": name, "__doc__": base.__doc__})
    globals()[name] = made  # torch.compile's artifacts name classes by import path
    return made

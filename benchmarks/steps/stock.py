"""vLLM's own LoRA kernels, called as its Punica wrapper calls them, on pools padded to the largest rank."""

import contextlib
import os
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from scute.tuning.layers import LayerShape
from scute.tuning.truth import Verdict, compare_slices

Config = tuple[tuple[str, int], ...]

FOLDER_VARIABLE = "VLLM_TUNED_CONFIG_FOLDER"

# Triton's interpreter runs one program after another, and vLLM's own sizes make thousands.
DRY_CONFIGURATION = tuple(
    {"block_m": 16, "block_n": 128, "block_k": 64, "split_k": 1, "num_warps": 4, "num_stages": 1, "num_ctas": 1}.items()
)


def interpret_on_cpu() -> None:
    """Let vLLM import its Triton kernels without a GPU. Call before vLLM is imported, with TRITON_INTERPRET set."""
    from triton.backends import backends

    backends.setdefault("cpu", types.SimpleNamespace(driver=types.SimpleNamespace(is_active=lambda: True)))


def use_configurations(folder: Path | None) -> None:
    """Have vLLM read its block sizes from the files of `folder`, or use those that it ships."""
    from vllm.lora.ops.triton_ops import utils

    if folder is None:
        os.environ.pop(FOLDER_VARIABLE, None)
    else:
        os.environ[FOLDER_VARIABLE] = str(folder)
    utils.load_lora_op_config.cache_clear()
    utils.get_lora_op_configs.cache_clear()


@contextlib.contextmanager
def using(config: Config | None) -> Iterator[None]:
    """vLLM's kernels run with these block sizes; None: with those that it ships."""
    from vllm.lora.ops.triton_ops import lora_expand_op, lora_shrink_op

    modules = lora_shrink_op, lora_expand_op
    before = [module.get_lora_op_configs for module in modules]
    if config is not None:
        for module in modules:
            module.get_lora_op_configs = lambda *_, **__: dict(config)
    try:
        yield
    finally:
        for module, function in zip(modules, before, strict=True):
            module.get_lora_op_configs = function


class StockPool:
    """ranks[j]: rank of the LoRA adapter in slot j; every factor is padded with zeros to the largest of them."""

    def __init__(
        self,
        ranks: Sequence[int],
        shapes: Sequence[LayerShape],
        copies: int,
        dtype: torch.dtype,
        device: torch.device | str,
        seed: int = 0,
    ) -> None:
        from vllm.lora.ops.triton_ops import utils

        # vLLM looks up pointers and strides by address, and the allocator hands out addresses again.
        utils._LORA_A_PTR_DICT.clear()
        utils._LORA_B_PTR_DICT.clear()
        self.ranks = tuple(ranks)
        self.rank = max(ranks)
        self.dtype, self.device = dtype, torch.device(device)
        self._random = torch.Generator(self.device).manual_seed(seed)
        self.layers = [StockLayer(self, shape) for _ in range(copies) for shape in shapes]

    def draw(self, rows_are_ranks: bool, size: int) -> Tensor:
        """[slots, 1, rank, size] or, for B, [slots, 1, size, rank]."""
        shape = (self.rank, size) if rows_are_ranks else (size, self.rank)
        tensor = torch.zeros(len(self.ranks), 1, *shape, dtype=self.dtype, device=self.device)
        for slot, rank in enumerate(self.ranks):
            own = tensor[slot, 0, :rank] if rows_are_ranks else tensor[slot, 0, :, :rank]
            deviation = (size if rows_are_ranks else rank) ** -0.5
            own.copy_(torch.empty_like(own).normal_(0.0, deviation, generator=self._random))
        return tensor

    def meta(self, slots: Sequence[int]) -> tuple[Tensor, ...]:
        """The arguments by which both kernels know the rows of a batch."""
        from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

        meta = LoRAKernelMeta.make(len(self.ranks), len(slots), self.device)
        meta.prepare_tensors(torch.tensor(slots, dtype=torch.int32, device=self.device))
        return meta.meta_args(len(slots), False)


class StockLayer:
    def __init__(self, pool: StockPool, shape: LayerShape) -> None:
        self.shape = shape
        self.a = tuple(pool.draw(True, shape.in_features) for _ in shape.slices)
        self.b = tuple(pool.draw(False, width) for width in shape.slices)

    def shrink(self, x: Tensor, meta: tuple[Tensor, ...], out: Tensor) -> None:
        from vllm.lora.ops.triton_ops.lora_shrink_op import _lora_shrink

        _lora_shrink(x, self.a, out, *meta, 1.0)

    def expand(self, y: Tensor, shrunk: Tensor, meta: tuple[Tensor, ...]) -> None:
        from vllm.lora.ops.triton_ops.lora_expand_op import _lora_expand

        _lora_expand(shrunk, self.b, y, *meta, offset_start=0, add_inputs=True)

    def buffer(self, x: Tensor) -> Tensor:
        rank = self.b[0].shape[-1]
        return torch.empty(len(self.shape.slices), x.shape[0], rank, dtype=torch.float32, device=x.device)

    def adapt(self, y: Tensor, x: Tensor, meta: tuple[Tensor, ...]) -> None:
        shrunk = self.buffer(x)
        self.shrink(x, meta, shrunk)
        self.expand(y, shrunk, meta)

    def shrunk_rows(self, slots: Sequence[int], x: Tensor) -> Tensor:
        """[slices, rows, rank] in float64; row i is of slot slots[i]."""
        return torch.stack([_by_slot(slots, x, lambda slot, rows, a=a: rows @ a[slot, 0].double().t()) for a in self.a])

    def expanded_rows(self, slots: Sequence[int], shrunk: Tensor) -> Tensor:
        """[rows, out]: the term, from shrunk rows [slices, rows, rank]."""
        terms = [
            _by_slot(slots, h, lambda slot, rows, b=b: rows @ b[slot, 0].double().t())
            for h, b in zip(shrunk, self.b, strict=True)
        ]
        return torch.cat(terms, dim=1)

    def adapted_rows(self, slots: Sequence[int], x: Tensor, y: Tensor) -> Tensor:
        return y + self.expanded_rows(slots, self.shrunk_rows(slots, x))

    def check(self, rows: Sequence[int], slots: Sequence[int], x: Tensor, before: Tensor, after: Tensor) -> Verdict:
        """after [T, out]: what the kernels made of `before`; slots: of the sampled rows."""
        exact = self.adapted_rows(slots, x[rows].double(), before[rows].double())
        return compare_slices(self.shape.slices, rows, after, exact)


def _by_slot(slots: Sequence[int], x: Tensor, product) -> Tensor:  # type: ignore[no-untyped-def]
    out: list[Tensor | None] = [None] * len(slots)
    for slot in set(slots):
        rows = [row for row, s in enumerate(slots) if s == slot]
        for row, value in zip(rows, product(slot, x[rows]), strict=True):
            out[row] = value
    return torch.stack([value for value in out if value is not None])

"""Kernels whose launches skip what Triton works out anew for each: a step outside a CUDA graph makes hundreds.

There the host would take longer to launch them than the GPU to run them.
"""

from collections.abc import Callable
from functools import partial, reduce
from inspect import signature
from operator import attrgetter, itemgetter, or_
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

ALIGNMENT = 16
"""Bytes. Triton compiles a kernel for tensors that all start at a multiple of it, or for fewer that do."""

_dtype = attrgetter("dtype")


class Kernel:
    """A Triton kernel, called as Triton has it: `kernel[grid](*tensors, *numbers, **constants and options)`.

    Triton compiles for every kind of argument: dtypes, alignments, constants, and whether a number is a multiple of 16.
    Here all of these are one key, with the numbers themselves but for `stepwise` ones; what Triton's own launch
    compiled under it is launched again with nothing but pointers and numbers. The interpreter knows no such thing. As
    with Triton, tensors have to be on the current device.
    """

    def __init__(self, function: Any, stepwise: tuple[str, ...]) -> None:
        """function: jitted. stepwise: names of numbers that it was not specialised on."""
        self.function = function
        self._stepwise = stepwise
        self._parameters = signature(function.fn).parameters
        self._constants = [name for name, p in self._parameters.items() if p.annotation is tl.constexpr]
        self._compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}
        self._tensors = 0
        self._fixed: Callable[[tuple[Any, ...]], Any] | None = None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        if not self._is_on_gpu(arguments[0]):
            self.function[grid](*arguments, **constants)
            return
        fixed = self._fixed or self._learn(arguments)
        tensors, numbers = arguments[: self._tensors], arguments[self._tensors :]
        pointers = tuple(map(Tensor.data_ptr, tensors))
        key = arguments[0].get_device(), fixed(arguments), *map(_dtype, tensors), *constants.items()
        known = self._compiled.get(key)
        is_aligned = reduce(or_, pointers) % ALIGNMENT == 0
        if known is not None and is_aligned:
            compiled, values = known
            compiled[(*grid, 1, 1)[:3]](*pointers, *numbers, *values)
            return
        compiled = self.function[grid](*arguments, **constants)
        if is_aligned and compiled is not None:  # Triton gives nothing back to who interprets, or looks on
            self._compiled[key] = compiled, tuple(constants[name] for name in self._constants)

    def _learn(self, arguments: tuple[Any, ...]) -> Callable[[tuple[Any, ...]], Any]:
        """Which arguments are tensors, all before the others, and which numbers do not change from step to step."""
        self._tensors = sum(isinstance(argument, Tensor) for argument in arguments)
        names = list(self._parameters)[: len(arguments)]
        self._fixed = itemgetter(*(i for i in range(self._tensors, len(names)) if names[i] not in self._stepwise))
        return self._fixed

    def _is_on_gpu(self, tensor: Tensor) -> bool:
        return tensor.is_cuda


def kernel(*stepwise: str) -> Callable[[Callable[..., Any]], Kernel]:
    """Like `triton.jit`. stepwise: numbers that change from step to step, on whose value no code should depend."""

    def make(function: Callable[..., Any]) -> Kernel:
        return Kernel(triton.jit(do_not_specialize=list(stepwise))(function), stepwise)

    return make

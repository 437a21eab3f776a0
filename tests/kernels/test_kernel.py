"""Launching what Triton has compiled: once for each kind of arguments, and then without Triton's own launch."""

from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from scute.kernels.kernel import Kernel

GRID = (3, 2)


class Compiled:
    """As Triton returns it: launched with a grid of three numbers and all parameters in order."""

    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls

    def __getitem__(self, grid: tuple[int, int, int]):
        return lambda *arguments: self._calls.append((grid, *arguments))


class Jitted:
    """Stands in for a jitted function: notes the launches that went through Triton, and those that did not."""

    def __init__(self) -> None:
        self.slow: list[Any] = []
        self.fast: list[Any] = []

    def fn(self, x, y, width, tokens, starts, stride, BLOCK: tl.constexpr, WIDE: tl.constexpr):
        """The parameters of a kernel."""

    def __getitem__(self, grid: tuple[int, ...]):
        def launch(*arguments: Any, **constants: Any) -> Compiled:
            self.slow.append((grid, *arguments, constants))
            return Compiled(self.fast)

        return launch


class OnGpu(Kernel):
    def _is_on_gpu(self, tensor: Tensor) -> bool:  # noqa: ARG002
        return True


@pytest.fixture
def jitted() -> Jitted:
    return Jitted()


@pytest.fixture
def kernel(jitted: Jitted) -> OnGpu:
    return OnGpu(jitted, ("tokens",))


def launch(kernel: Kernel, x: Tensor, y: Tensor, width=4, tokens=9, starts=(0, 8), stride=16, **constants: Any) -> None:
    kernel[GRID](x, y, width, tokens, starts, stride, **{"WIDE": True, "BLOCK": 32, "num_warps": 4} | constants)


def test_the_second_launch_is_direct_with_pointers_and_numbers(kernel, jitted):
    x, y = torch.zeros(4, 16), torch.zeros(4, 16)
    launch(kernel, x, y)
    assert (len(jitted.slow), len(jitted.fast)) == (1, 0)
    launch(kernel, x, y, tokens=70)
    assert len(jitted.slow) == 1
    # Constants in the order of the parameters, whatever their order in the call; options are in what was compiled.
    assert jitted.fast == [((3, 2, 1), x.data_ptr(), y.data_ptr(), 4, 70, (0, 8), 16, 32, True)]


@pytest.mark.parametrize(
    "changed",
    [{"width": 5}, {"starts": (0, 7)}, {"stride": 17}, {"BLOCK": 64}, {"WIDE": False}, {"num_warps": 8}],
    ids=str,
)
def test_what_triton_would_compile_for_is_compiled(kernel, jitted, changed):
    x, y = torch.zeros(4, 16), torch.zeros(4, 16)
    launch(kernel, x, y)
    launch(kernel, x, y, **changed)
    assert len(jitted.slow) == 2
    launch(kernel, x, y, **changed)
    launch(kernel, x, y)
    assert (len(jitted.slow), len(jitted.fast)) == (2, 2)


def test_other_dtypes_are_compiled(kernel, jitted):
    x, y = torch.zeros(4, 16), torch.zeros(4, 16)
    launch(kernel, x, y)
    launch(kernel, x, y.half())
    launch(kernel, x.half(), y)
    assert len(jitted.slow) == 3


def test_tensors_that_are_not_aligned_go_through_triton_each_time(kernel, jitted):
    x, y = torch.zeros(4, 16), torch.zeros(65)[1:]
    for _ in range(2):
        launch(kernel, x, y)
    assert len(jitted.slow) == 2
    launch(kernel, x, torch.zeros(64))
    launch(kernel, x, y)  # nor do they use what was compiled for aligned ones
    assert (len(jitted.slow), len(jitted.fast)) == (4, 0)


def test_the_interpreter_gets_every_launch():
    jitted = Jitted()
    kernel = Kernel(jitted, ("tokens",))
    for _ in range(2):
        launch(kernel, torch.zeros(4, 16), torch.zeros(4, 16))
    assert len(jitted.slow) == 2

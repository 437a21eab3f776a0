"""The ops on CUDA tensors: which kernels a batch needs, in order."""

from torch import Tensor
from torch.nn import functional

from scute.kernels import launch_decode, launch_prefill, launch_rotate
from scute.kernels.arguments import unpack
from scute.kernels.gemm import sliced_linear
from scute.kernels.plan import SMALL_TILE, tile_height
from scute.kernels.routes import Route


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: object) -> Tensor:
    """The op `linear`."""
    slots, plan = unpack(arguments)
    if not slots.rotation_width or not plan.is_live(Route.ROTATION) or not x.shape[0]:
        y = functional.linear(x, weight, bias)
        adapt(y, x, *arguments)
    elif not plan.is_live(Route.LOW_RANK) or tile_height(x.shape[0]) != SMALL_TILE:
        y = launch_rotate.rotated_gemms(x, weight, bias, slots, plan)
        adapt(y, x, *arguments)
    elif launch_rotate.has_fused_gemm(x, slots):
        # Both are kept: the shrink beside the GEMM must not be given their memory.
        inputs = launch_rotate.rotate(x, slots, plan)
        y, _partial = launch_rotate.fused_linear(inputs, weight, bias, slots)
        shrunk = launch_decode.shrink(x, slots, plan, beside_gemm=True)
        launch_decode.expand(y, shrunk, slots, plan)
    else:
        inputs, shrunk = launch_decode.rotate_with_shrink(x, slots, plan)
        y = sliced_linear(inputs, weight, bias, slots.slice_starts)
        launch_decode.expand(y, shrunk, slots, plan)
    return y


def adapt(y: Tensor, x: Tensor, *arguments: object) -> None:
    """The op `adapt`: one shrink and one expand for all slots and pairs."""
    slots, plan = unpack(arguments)
    if not x.shape[0] or not plan.is_live(Route.LOW_RANK):
        return
    if tile_height(x.shape[0]) == SMALL_TILE:
        launch_decode.expand(y, launch_decode.shrink(x, slots, plan), slots, plan)
    else:
        launch_prefill.adapt(y, x, slots, plan)


def rotate(x: Tensor, *arguments: object) -> Tensor:
    """The op `rotate`."""
    return launch_rotate.rotate(x, *unpack(arguments))

"""Products of block-diagonal input transforms, and with the rows of a factor."""

import math

import torch
from torch import Tensor

from scute.algebra.form import Rotation


def compose(one: Rotation | None, then: Rotation | None) -> Rotation | None:
    """x → (x one) then. Its blocks are as wide as the least common multiple of both widths."""
    if one is None or then is None:
        return then if one is None else one
    width = composed_width(one.width, then.width)
    left, right = widen(one.blocks, width), widen(then.blocks, width)
    wide = torch.promote_types(_wide(left), _wide(right))
    return Rotation(left.to(wide) @ right.to(wide))


def composed_width(*widths: int) -> int:
    """The width of the blocks of a product."""
    return math.lcm(*widths)


def widen(blocks: Tensor, width: int) -> Tensor:
    """[n, w, w] as the same transform in blocks of a multiple of w: [n w / width, width, width]."""
    old = blocks.shape[-1]
    count = width // old
    grouped = blocks.reshape(-1, count, old, old)
    wide = blocks.new_zeros(grouped.shape[0], count, old, count, old)
    for index in range(count):
        wide[:, index, :, index] = grouped[:, index]
    return wide.reshape(-1, width, width)


def rotate_rows(rotation: Rotation, a: Tensor) -> Tensor:
    """R A, so that (x R) A = x (R A); a: [in, rank]."""
    wide = torch.promote_types(_wide(a), _wide(rotation.blocks))
    grouped = a.to(wide).reshape(-1, rotation.width, a.shape[1])
    return (rotation.blocks.to(wide) @ grouped).reshape(a.shape)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)

"""What one adapter puts into one output slice of one layer, and the room that it takes on the device."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from scute.kernels.routes import Field, Flag, units_of


@dataclass(frozen=True, slots=True, eq=False)
class SliceSlots:
    """The slots of one slice on this rank, on the host. A slot that is None is the identity and takes no room.

    a: [rank, in], b: [rank, out] in the LoRA dtype, or None. scale, shift, e: [out] float32 or None.
    d: [shared rank] float32 or None (d and e come together). rotation: [in * width], R - I in the LoRA dtype.
    """

    a: Tensor | None = None
    b: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    d: Tensor | None = None
    e: Tensor | None = None
    rotation: Tensor | None = None
    width: int = 0

    @property
    def rank(self) -> int:
        return 0 if self.a is None else self.a.shape[0]

    @property
    def flags(self) -> int:
        present = {
            Flag.SCALE: self.scale,
            Flag.SHIFT: self.shift,
            Flag.SHARED: self.e,
            Flag.ROTATION: self.rotation,
        }
        return sum(flag for flag, tensor in present.items() if tensor is not None)

    def pieces(self) -> Iterator[tuple[Field, Tensor]]:
        """The tensors that are there, in the order in which they lie in the arena."""
        tensors = {
            Field.A: self.a,
            Field.B: self.b,
            Field.SCALE: self.scale,
            Field.SHIFT: self.shift,
            Field.D: self.d,
            Field.E: self.e,
            Field.ROTATION: self.rotation,
        }
        yield from ((field, tensor) for field, tensor in tensors.items() if tensor is not None)

    @property
    def units(self) -> int:
        return sum(units_of(tensor.nbytes) for _, tensor in self.pieces())

"""Ways to apply a scale of the output outside the expand: passes of their own (paper, Proposition A2, appendix F)."""

from typing import NamedTuple


class OutsidePass(NamedTuple):
    """transfers: how often [rows, out] is read or written more; launches: kernels more than with plain LoRA."""

    transfers: int
    launches: int

    def bytes_moved(self, rows: int, out_features: int, element: int = 2) -> int:
        """Bytes that the extra reads and writes move; element: bytes of an element of y."""
        return self.transfers * rows * out_features * element


OUTSIDE = {
    "side kernel": OutsidePass(2, 1),
    "gathered scale": OutsidePass(2, 1),
    "index scale": OutsidePass(4, 2),
    "vLLM outside": OutsidePass(4, 3),
}


def carried_scale(adapters: int, out_features: int, element: int = 4) -> int:
    """Bytes that a scale adds to an expand that carries it: each adapter's vector, once."""
    return adapters * out_features * element


def rotation_pass(adapters: int, rows: int, in_features: int, width: int, element: int = 2) -> int:
    """Bytes of one input transform in a pass of its own: x read, x R written, and every adapter's blocks."""
    return element * in_features * (2 * rows + adapters * width)

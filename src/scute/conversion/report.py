"""What a conversion has written, and what it loses."""

from dataclasses import dataclass

from scute.agreement import Agreement


@dataclass(frozen=True, slots=True)
class Layer:
    """One projection. route: "exact" or the method; rank: of its factors; update: ‖ΔW‖²; rest: ‖ΔW - A B‖²."""

    module: str
    route: str
    rank: int
    update: float
    rest: float

    @property
    def left_out(self) -> float:
        """Share of the squared norm of ΔW that the LoRA leaves out."""
        return self.rest / self.update if self.update else 0.0


@dataclass(frozen=True, slots=True)
class Conversion:
    """A finished conversion.

    source: the method of the adapter. agreement: error and effect, with the converted adapter in the place of the
    engine and the normal form in that of the PEFT library, both in float32; None if not measured. measured_on: the
    text. notes: sentences for a reader.
    """

    source: str
    layers: tuple[Layer, ...]
    agreement: Agreement | None
    measured_on: str
    notes: tuple[str, ...]

    @property
    def left_out(self) -> float:
        """Share of the squared norm of all updates together that the LoRA leaves out."""
        total = sum(layer.update for layer in self.layers)
        return sum(layer.rest for layer in self.layers) / total if total else 0.0

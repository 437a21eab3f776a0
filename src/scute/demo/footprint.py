"""What an adapter holds once it is compiled: the slots that stay live, and the bytes that it alone owns."""

from dataclasses import dataclass
from pathlib import Path

from scute.admission import compile_adapter
from scute.admission.base_folder import read_base
from scute.admission.description import describe


@dataclass(frozen=True, slots=True)
class Footprint:
    """live_slots: names in the order of the formula; owned_bytes: tensors in the checkpoint's precision."""

    live_slots: tuple[str, ...]
    owned_bytes: int


def footprint(adapter: Path, base: Path) -> Footprint:
    """Compile a PEFT folder for the base model of another folder, and describe the result."""
    found = describe(compile_adapter(adapter, read_base(base)))
    return Footprint(found.live_slots, found.owned_bytes)

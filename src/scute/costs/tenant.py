"""An adapter as costs see it: its slots on every slice of every layer; and what it is once it is converted to LoRA."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from scute.costs.base import Base
from scute.costs.layers import FusedLayer
from scute.costs.slots import Counting, Piece, Slots, room
from scute.errors import Refusal

if TYPE_CHECKING:
    from scute.admission import BaseModel
    from scute.algebra import AdapterForm

STOCK_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `--max-lora-rank`; vLLM runs every adapter at the one that its largest rank needs."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """slots: layer by layer and slice by slice, None where the adapter changes nothing."""

    name: str
    method: str
    slots: tuple[tuple[Slots | None, ...], ...]

    @classmethod
    def of(cls, form: "AdapterForm", base: Base, name: str) -> Self:
        """Raises ValueError if a projection that the adapter changes is in no layer of the base model."""
        members = dict(form.members)
        slots = []
        for layer in base.layers:
            found = [(module, members.pop(module, None)) for module in layer.modules]
            slots.append(tuple(None if m is None else Slots.of(m, module in base.biased) for module, m in found))
        if members:
            raise ValueError(f"{name} changes {next(iter(members))}, which is no layer that is served")
        return cls(name, form.method, tuple(slots))

    @property
    def max_rank(self) -> int:
        """Of the terms that it owns or shares."""
        return max((max(s.rank, s.shared_rank) for layer in self.slots for s in layer if s is not None), default=0)

    @property
    def is_lora(self) -> bool:
        """Whether it has A and B only."""
        return all(s is None or s == Slots(rank=s.rank) for layer in self.slots for s in layer)

    def converted(self, rank: int) -> Self:
        """As LoRA of `rank` on the projections that it adapts; what is LoRA stays as it is."""
        if self.is_lora:
            return self
        slots = tuple(tuple(None if s is None else Slots(rank=rank) for s in layer) for layer in self.slots)
        return type(self)(self.name, f"LoRA of rank {rank}", slots)

    def with_zeros(self) -> Self:
        """With zero factors where it adapts nothing, as vLLM's kernels run it; they have its largest rank."""
        zero = Slots(rank=self.max_rank)
        slots = tuple(tuple(zero if s is None else s for s in layer) for layer in self.slots)
        return type(self)(self.name, self.method, slots)

    def padded(self, rank: int) -> Self:
        """As vLLM stores and runs a LoRA adapter in an engine of that rank: on every layer, filled up with zeros."""
        slots = tuple(tuple(Slots(rank=rank) for _ in layer) for layer in self.slots)
        return type(self)(self.name, self.method, slots)

    def packed_bytes(self, base: Base) -> int:
        """Of the packed adapter: in pinned host memory, and again in the arena while it is active.

        A b that turns out to be zero takes no room there.
        """
        return self.owned(base.layers, base.counting, in_arena=True).total()

    def owned(self, layers: Iterable[FusedLayer], counting: Counting, *, in_arena: bool = False) -> Counter[Piece]:
        """Bytes of what it owns, by piece. in_arena: as its pieces lie there, each from a unit on."""
        total: Counter[Piece] = Counter()
        for (shape, _), slots in zip(layers, self.slots, strict=True):
            for own, out in zip(slots, shape.slices, strict=True):
                if own is not None:
                    pieces = own.bytes_owned(shape.in_features, out, counting)
                    total.update(room(pieces.items()) if in_arena else pieces)
        return total


def pair_bytes(tenants: Iterable[Tenant], base: Base) -> int:
    """Bytes on the device of the different shared pairs of the tenants, in places of their own ranks."""
    slots = (s for tenant in tenants for layer in tenant.slots for s in layer if s is not None)
    return sum({s.pair: s.shared_rank for s in slots if s.pair is not None}.values()) * base.pair_bytes_a_rank


def read_tenant(folder: Path, base: Base, model: "BaseModel") -> Tenant:
    """The adapter of a folder, from the headers of its tensors, and from their values where it shares a pair.

    Raises Refusal, which names the folder, for one whose headers say that it is not served, and as `Tenant.of` does.
    """
    from scute.admission.compile import compile_adapter, find_form
    from scute.admission.reasons import Reasons
    from scute.admission.targets import refuse_output_head

    try:
        form = find_form(folder, model, Reasons(), values=False)
        assert form is not None, "reasons that are not collected are raised"
        refuse_output_head(form.members, model)
        if any(term.pair is not None for member in form.members.values() for term in member.terms):
            form = compile_adapter(folder, model)  # whether two share a pair, its values alone tell
    except Refusal as refusal:
        raise refusal.of(folder.name) from refusal
    return Tenant.of(form, base, folder.name)


def least_stock_rank(needed: int) -> int | None:
    """The least `--max-lora-rank` of at least that rank; None where vLLM has none."""
    return next((rank for rank in STOCK_RANKS if rank >= needed), None)


def stock_rank(tenants: Sequence[Tenant]) -> int:
    """The rank that vLLM runs LoRA tenants at. Raises ValueError where it has none as large."""
    needed = max((tenant.max_rank for tenant in tenants), default=0)
    found = least_stock_rank(needed)
    if found is None:
        raise ValueError(f"vLLM serves no LoRA of rank {needed}; its largest is {STOCK_RANKS[-1]}")
    return found

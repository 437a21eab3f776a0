"""What a compiled adapter is made of: its ranks, what became of its slots, and the bytes it owns and shares."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from scute.algebra.fold import Fold, fold
from scute.algebra.form import AdapterForm, Member, Owner


@dataclass(frozen=True, slots=True)
class SlotUse:
    """One slot of the normal form as the adapter uses it.

    slot: its name in the formula; into: the tensor that takes it, None if it stays live; reason: why;
    num_projections: on how many projections.
    """

    slot: str
    into: str | None
    reason: str
    num_projections: int


@dataclass(frozen=True, slots=True)
class Description:
    """An adapter for a reader.

    ranks: distinct total ranks of the terms that it owns; shared_ranks: of those on shared factors;
    rotation_widths: distinct block widths of R. Bytes are those of the compiled tensors in the precision of the
    file, before anything is cast for an engine; a shared pair counts once.
    """

    method: str
    num_projections: int
    ranks: tuple[int, ...]
    shared_ranks: tuple[int, ...]
    rotation_widths: tuple[int, ...]
    slots: tuple[SlotUse, ...]
    owned_bytes: int
    shared_bytes: int

    @property
    def live_slots(self) -> tuple[str, ...]:
        """Names in the order of the formula."""
        return tuple(use.slot for use in self.slots if use.into is None)

    @property
    def sizes(self) -> tuple[str, ...]:
        """Ranks, ranks of shared factors and widths of R, as one reads them in a row."""
        shared = [f"{rank} shared" for rank in self.shared_ranks]
        return (*map(str, self.ranks), *shared, *(f"R {width}" for width in self.rotation_widths))

    @property
    def engine_needs(self) -> dict[str, int]:
        """The least values of vLLM's flag and Scute's options that admit it; without those that it does not need."""
        needs = {
            "--max-lora-rank": max(self.ranks, default=0),
            "shared_rank": max(self.shared_ranks, default=0),
            "rotation_width": max(self.rotation_widths, default=0),
        }
        return {name: least for name, least in needs.items() if least}


def describe(form: AdapterForm) -> Description:
    """Fold every member and add up what is there."""
    members = tuple(form.members.values())
    terms = [term for member in members for term in member.terms]
    pairs = {term.pair.key: term.pair for term in terms if term.pair is not None}
    return Description(
        method=form.method,
        num_projections=len(members),
        ranks=tuple(sorted({member.rank for member in members if member.rank})),
        shared_ranks=tuple(sorted({pair.rank for pair in pairs.values()})),
        rotation_widths=tuple(sorted({m.rotation.width for m in members if m.rotation is not None})),
        slots=_slot_uses(members),
        owned_bytes=_num_bytes(tensor for member in members for tensor in _owned(member)),
        shared_bytes=_num_bytes(factor for pair in pairs.values() for factor in (pair.a, pair.b)),
    )


def _slot_uses(members: tuple[Member, ...]) -> tuple[SlotUse, ...]:
    """Live and folded slots in the order of the formula, one entry a slot and fate."""
    counts: dict[tuple[str, str | None, str], int] = {}
    for member in members:
        for record in {(r.slot, r.into, r.reason) for r in _folds(member)}:
            counts[record] = counts.get(record, 0) + 1
    order = sorted(counts, key=lambda record: ("Rsbcde".index(record[0]), record[1] or ""))
    return tuple(SlotUse(*record, counts[record]) for record in order)


def _folds(member: Member) -> tuple[Fold, ...]:
    # Which slots fold does not depend on the values, so ones may stand for the norms of the base weight.
    if member.magnitude is not None:
        member = member.resolve_magnitude(torch.ones_like(member.magnitude))
    return fold(member)[1]


def _owned(member: Member) -> Iterator[Tensor]:
    """The member's tensors less the factors that it shares with other adapters."""
    bias = member.bias
    rotation = None if member.rotation is None else member.rotation.blocks
    slots = [rotation, member.scale, member.magnitude, bias.replaced, bias.shift, bias.factor]
    for term in member.terms:
        slots += [term.d, term.e]
        slots += [term.a] if term.a_owner is Owner.ADAPTER else []
        slots += [term.b] if term.b_owner is Owner.ADAPTER else []
    return (slot for slot in slots if slot is not None)


def _num_bytes(tensors: Iterator[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

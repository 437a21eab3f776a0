"""Members as a compiled folder has them: the name of every tensor, and what the manifest says of it."""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from scute.admission.compiled.manifest import MemberEntry, PairEntry, TermEntry
from scute.algebra.form import Member, Owner, SharedPair, Term


def only_pair(members: Mapping[str, Member]) -> SharedPair | None:
    """The shared pair of an adapter. Raises ValueError for two of them, and for factors that are shared without one."""
    pairs: dict[int, SharedPair] = {}
    for name, member in members.items():
        if sum(term.pair is not None for term in member.terms) > 1:
            raise ValueError(f"{name}: a member has at most one term on the pair")
        for term in member.terms:
            if {term.a_owner, term.b_owner} != {Owner.ADAPTER if term.pair is None else Owner.SHARED}:
                raise ValueError(f"{name}: a term has both factors of its own, or both of a shared pair")
            if not math.isfinite(term.c):
                raise ValueError(f"{name}: c = {term.c} is not finite")
            if term.pair is not None:
                pairs[id(term.pair)] = term.pair
                if not _is_leading_part(term, term.pair):
                    raise ValueError(f"{name}: its shared factors are not the leading part of the pair")
    found = list(pairs.values())
    if not all(torch.equal(pair.a, found[0].a) and torch.equal(pair.b, found[0].b) for pair in found[1:]):
        raise ValueError("an adapter has at most one shared pair")
    return found[0] if found else None


def _is_leading_part(term: Term, pair: SharedPair) -> bool:
    return torch.equal(term.a, pair.a[: term.a.shape[0]]) and torch.equal(term.b, pair.b[:, : term.b.shape[1]])


def named_tensors(members: Mapping[str, Member], pair: SharedPair | None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a folder with its name.

    Factors are written as PEFT has them, [rank, in] and [out, rank], so that they lie in memory alike when read.
    """
    if pair is not None and pair.drawn_from is None:
        yield from (("pair.A", pair.a.T), ("pair.B", pair.b.T))
    for name, member in members.items():
        for slot, tensor in _slots(member).items():
            yield f"{name}.{slot}", tensor
        for index, term in enumerate(member.terms):
            own = {} if term.pair is not None else {"A": term.a.T, "B": term.b.T}
            for slot, tensor in (own | _vectors(term)).items():
                yield f"{name}.{index}.{slot}", tensor


def plain(tensor: Tensor) -> Tensor:
    """A copy that shares memory with no other tensor, which safetensors would not write."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _slots(member: Member) -> dict[str, Tensor]:
    bias = member.bias
    slots = {
        "R": None if member.rotation is None else member.rotation.blocks,
        "s": member.scale,
        "magnitude": member.magnitude,
        "b.replaced": bias.replaced,
        "b.shift": bias.shift,
        "b.factor": bias.factor,
    }
    return {slot: tensor for slot, tensor in slots.items() if tensor is not None}


def _vectors(term: Term) -> dict[str, Tensor]:
    return {slot: tensor for slot, tensor in (("d", term.d), ("e", term.e)) if tensor is not None}


def entry_of(member: Member) -> MemberEntry:
    """What the manifest says of a member."""
    return MemberEntry.model_validate(
        {
            "slots": list(_slots(member)),
            "block_width": 0 if member.rotation is None else member.rotation.width,
            "scales_bias": member.bias.scaled,
            "terms": [
                TermEntry.model_validate(
                    {"c": float(t.c), "rank": t.rank, "shared": t.pair is not None, "vectors": list(_vectors(t))}
                )
                for t in member.terms
            ],
        }
    )


def pair_entry(pair: SharedPair | None) -> PairEntry | None:
    """What the manifest says of the shared pair."""
    if pair is None:
        return None
    return PairEntry(rank=pair.rank, inputs=pair.a.shape[0], outputs=pair.b.shape[1], drawn_from=pair.drawn_from)

"""Where an adapter's projections live in the engine: which wrapped layer, which slice of it, which shard."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from scute.algebra.form import Bias, Member, Rotation, Term
from scute.errors import Code, Refusal


@dataclass(frozen=True, slots=True)
class Place:
    """A projection of the base model is part `index` of the `count` that vLLM fused into `module`."""

    module: str
    index: int
    count: int


def index_places(packed_modules: Mapping[str, Sequence[str]], modules: Mapping[str, Any]) -> dict[str, Place]:
    """vLLM's name of every projection to its place; `packed_modules` and `modules` are the LoRA manager's."""
    places = {}
    for name in modules:
        parts = packed_modules.get(name) or [name]
        for index, part in enumerate(parts):
            places[part] = Place(name, index, len(parts))
    return places


def localize(layer: Any, members: Sequence[Member | None]) -> list[Member | None]:
    """Members of the parts of one wrapped layer to members of its slices on this tensor-parallel rank.

    A member's slots along the output travel as columns of one matrix through the layer's own `slice_lora_b`, so
    that vLLM alone decides which rows a rank holds; its slots along the input follow `slice_lora_a`.
    """
    columns: Columns = [
        None if m is None else _output_columns(m, out) for m, out in zip(members, layer.part_sizes, strict=True)
    ]
    owners = [None if m is None else torch.tensor([i]) for i, m in enumerate(members)]
    local, owner_of_slice = _split(layer, columns, owners)
    result: list[Member | None] = []
    for part, owner in zip(local, owner_of_slice, strict=True):
        member = None if owner is None else members[int(owner)]
        if member is None or part is None:
            result.append(None)
        else:
            result.append(_localize_input(layer, _with_output_columns(member, part)))
    return result


Columns = list[Tensor | None]


def _split(layer: Any, columns: Columns, owners: Columns) -> tuple[Columns, Columns]:
    """Columns of the layer's parts to columns of its slices on this rank, with the part each slice came from."""
    if len(columns) != layer.n_slices:
        if len(columns) == 1:  # one checkpoint weight for the whole fused layer
            whole = columns[0]
            columns = [None if whole is None else part for part in _by_sizes(whole, layer.base_layer.output_sizes)]
            owners = owners * layer.n_slices
        else:
            owners, columns = layer.expand_packed_lora(owners, columns)
    if layer.tp_size == 1:
        return columns, owners
    if layer.n_slices == 1:
        return [None if c is None else layer.slice_lora_b(c) for c in columns], owners
    return layer.slice_lora_b(columns), owners


def _by_sizes(whole: Tensor | None, sizes: Sequence[int]) -> list[Tensor | None]:
    return [None] * len(sizes) if whole is None else list(whole.split(list(sizes)))


def _output_columns(member: Member, out: int) -> Tensor:
    """Everything of the member that is indexed by the output, [out, k]; k is 0 where it only has an R."""
    tensors = [t.float() if t.dim() == 2 else t.float()[:, None] for t in _output_tensors(member)]
    return torch.cat([torch.empty(out, 0), *tensors], dim=1)


def _output_tensors(member: Member) -> list[Tensor]:
    tensors: list[Tensor | None] = []
    for term in member.terms:
        tensors += [term.b.T if term.pair is None else None, term.e]
    tensors += [member.scale, member.magnitude, member.bias.replaced, member.bias.shift, member.bias.factor]
    return [t for t in tensors if t is not None]


def _with_output_columns(member: Member, columns: Tensor) -> Member:
    """The member with its output-indexed tensors taken from [local out, k], in the order of `_output_tensors`."""
    position = 0

    def take(tensor: Tensor | None, width: int = 1) -> Tensor | None:
        nonlocal position
        if tensor is None:
            return None
        position += width
        part = columns[:, position - width : position]
        return part if tensor.dim() == 2 else part[:, 0]

    terms = []
    for term in member.terms:
        b = term.b if term.pair is not None else take(term.b, term.rank)
        assert b is not None
        terms.append(replace(term, b=b.T if term.pair is None else b, e=take(term.e)))
    scale, magnitude = take(member.scale), take(member.magnitude)
    old = member.bias
    bias = replace(old, replaced=take(old.replaced), shift=take(old.shift), factor=take(old.factor))
    return Member(member.rotation, scale, bias, tuple(terms), magnitude)


def _localize_input(layer: Any, member: Member) -> Member:
    """The member's input-indexed tensors cut to the columns this rank holds (row-parallel layers only)."""
    if not splits_input(layer):
        return member
    first, size = input_range(layer)
    terms = tuple(t if t.pair is not None else _narrow_term(t, first, size) for t in member.terms)
    rotation = member.rotation
    if rotation is not None:
        rotation = _narrow_rotation(rotation, first, size)
    bias = member.bias if layer.tp_rank == 0 else Bias()  # vLLM adds a row-parallel bias on rank 0 alone
    return Member(rotation, member.scale, bias, terms, member.magnitude)


def _narrow_term(term: Term, first: int, size: int) -> Term:
    return replace(term, a=term.a[first : first + size])


def _narrow_rotation(rotation: Rotation, first: int, size: int) -> Rotation:
    width = rotation.width
    if size % width:
        raise Refusal(
            Code.MODULE_UNSUPPORTED,
            f"an input transform with blocks of {width} cannot be cut at a tensor-parallel shard of {size} inputs; "
            "serve it with a tensor-parallel size that divides the blocks.",
        )
    return Rotation(rotation.blocks[first // width : (first + size) // width])


def input_range(layer: Any) -> tuple[int, int]:
    """(first, count) of the inputs that this rank holds of a wrapped layer."""
    size: int = layer.input_size
    whole: int = layer.base_layer.input_size
    return (0, whole) if size == whole else (layer.tp_rank * size, size)


def splits_input(layer: Any) -> bool:
    """Whether the ranks share out the inputs of a wrapped layer, so that their outputs are partial sums."""
    return input_range(layer)[1] != layer.base_layer.input_size


def output_offsets(layer: Any, parts: Sequence[int]) -> list[int] | None:
    """First output of each slice within its own projection, or None where a slice is not one run of outputs.

    parts: full output size of each part of the layer.
    """
    indices: Columns = [torch.arange(size)[:, None] for size in parts]
    local, _ = _split(layer, indices, list(indices))
    offsets = []
    for part in local:
        assert part is not None
        first = int(part[0, 0])
        if not torch.equal(part[:, 0], torch.arange(first, first + part.shape[0])):
            return None
        offsets.append(first)
    return offsets

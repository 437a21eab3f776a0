"""From a compiled folder back to the members that it was written from."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from scute.admission.base import BaseModel, Projection
from scute.admission.compiled.manifest import (
    MANIFEST_FILE,
    WEIGHTS_FILE,
    Manifest,
    MemberEntry,
    PairEntry,
    TermEntry,
    read_manifest,
)
from scute.admission.methods.oft import MAX_WIDTH
from scute.admission.methods.vera import drawn_pair, pair_of
from scute.admission.reasons import Reasons
from scute.admission.sites import no_module
from scute.admission.tensors import Tensors
from scute.algebra.form import AdapterForm, Bias, Member, Owner, Rotation, SharedPair, Term
from scute.errors import Code, Refusal


def read_folder(folder: Path, base: BaseModel, reasons: Reasons, *, values: bool = True) -> AdapterForm | None:
    """The normal form of a compiled folder, with every tensor as it was when the folder was written.

    Headers are checked before the digest and the digest before any value is used. values: False stops at the headers.
    Refuses the codes of `compiled.`, `folder.` and `tensor.`; None if one was collected.
    """
    files = _open(folder, reasons)
    if files is None:
        return None
    manifest, tensors = files
    reasons.attempt(_check_base, manifest, base)
    form = _form(manifest, tensors.without_values(), base)
    if reasons.found or not values:
        return form
    reasons.attempt(_check_digest, folder / WEIGHTS_FILE, manifest)
    return None if reasons.found else _form(manifest, tensors, base)


def _form(manifest: Manifest, tensors: Tensors, base: BaseModel) -> AdapterForm | None:
    members = tensors.reasons.attempt(_members, manifest, tensors, base)
    tensors.refuse_left_overs(MANIFEST_FILE)
    tensors.reasons.attempt(tensors.refuse_changes)
    return None if members is None else AdapterForm(manifest.method, members)


def check_files(folder: Path, reasons: Reasons) -> None:
    """Refuse what can be wrong with a compiled folder whatever the base model is."""
    _open(folder, reasons)


def _open(folder: Path, reasons: Reasons) -> tuple[Manifest, Tensors] | None:
    try:
        manifest = reasons.attempt(read_manifest, folder)
        tensors = None if manifest is None else reasons.attempt(_open_tensors, folder, reasons)
    except OSError as error:
        reason = f"the folder {folder.name!r} cannot be read: {error.strerror or error}."
        reasons.add(Refusal(Code.FOLDER_UNREADABLE, reason))
        return None
    if manifest is None or tensors is None:
        return None
    return manifest, tensors


def _open_tensors(folder: Path, reasons: Reasons) -> Tensors:
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise Refusal(
            Code.FOLDER_INCOMPLETE, f"the folder {folder.name!r} has {MANIFEST_FILE} and no {WEIGHTS_FILE}. Copy both."
        )
    return Tensors.of_file(path, reasons)


def _check_digest(path: Path, manifest: Manifest) -> None:
    """Tensors that are read afterwards are those of this digest: the file must not have changed since it was opened."""
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise Refusal(Code.FOLDER_UNREADABLE, f"{path.name} cannot be read: {error.strerror or error}.") from error
    if found != manifest.weights.sha256:
        raise Refusal(
            Code.COMPILED_HASH,
            f"{path.name} has the sha256 {found[:12]}..., but {MANIFEST_FILE} says {manifest.weights.sha256[:12]}.... "
            "It was changed after it was written: copy the folder again, or compile it again.",
        )


def _check_base(manifest: Manifest, base: BaseModel) -> None:
    if manifest.base.projections != base.fingerprint:
        raise Refusal(
            Code.COMPILED_BASE,
            f"{MANIFEST_FILE}: it was compiled for the base model {manifest.base.folder!r}, whose projections are not "
            "those of this one. Compile the adapter for this base model, or serve it on its own.",
        )


def _members(manifest: Manifest, tensors: Tensors, base: BaseModel) -> dict[str, Member]:
    projections: dict[str, Projection] = {}
    for name in manifest.members:
        if name in base.projections:
            projections[name] = base.projections[name]
        else:
            tensors.reasons.add(no_module(f"{MANIFEST_FILE}: {name}", name, base))
    # d proves the rank of the pair, so all that is the adapter's own comes before the pair.
    own = {name: _own_slots(name, manifest.members[name], p, tensors) for name, p in projections.items()}
    pair = None if manifest.pair is None else _pair(manifest, manifest.pair, tensors, projections, base)
    return {name: build(pair) for name, build in own.items()}


def _own_slots(
    name: str, entry: MemberEntry, projection: Projection, tensors: Tensors
) -> Callable[[SharedPair | None], Member]:
    """Takes what the adapter owns of one projection; the result makes a member of it, given the pair."""
    inputs, outputs = projection.in_features, projection.out_features

    def vector(slot: str) -> Tensor | None:
        return tensors.take(f"{name}.{slot}", outputs) if slot in entry.slots else None

    rotation = _rotation(f"{name}.R", entry.block_width, inputs, tensors) if entry.block_width else None
    bias = Bias(entry.scales_bias, vector("b.replaced"), vector("b.shift"), vector("b.factor"))
    scale, magnitude = vector("s"), vector("magnitude")
    terms = [_own_term(f"{name}.{index}", term, projection, tensors) for index, term in enumerate(entry.terms)]

    def build(pair: SharedPair | None) -> Member:
        return Member(rotation, scale, bias, tuple(term(pair) for term in terms), magnitude)

    return build


def _rotation(name: str, width: int, inputs: int, tensors: Tensors) -> Rotation:
    blocks = tensors.take(name, max(1, inputs // width), width, width)
    if inputs % width:
        reason = f"{name} has blocks of {width}, which do not divide the {inputs} inputs. Compile the adapter again."
        tensors.reasons.add(Refusal(Code.TENSOR_SHAPE, reason))
    if width > MAX_WIDTH:
        reason = f"{name} has blocks of {width}; at most {MAX_WIDTH} can be served."
        tensors.reasons.add(Refusal(Code.CAPACITY_ROTATION, reason))
    return Rotation(blocks)


def _own_term(
    name: str, entry: TermEntry, projection: Projection, tensors: Tensors
) -> Callable[[SharedPair | None], Term]:
    inputs, outputs = projection.in_features, projection.out_features
    d = tensors.take(f"{name}.d", entry.rank) if "d" in entry.vectors else None
    e = tensors.take(f"{name}.e", outputs) if "e" in entry.vectors else None
    if not entry.shared:
        a, b = tensors.take(f"{name}.A", entry.rank, inputs), tensors.take(f"{name}.B", outputs, entry.rank)
        return lambda _: Term(a.T, b.T, entry.c, d, e)

    def on_pair(pair: SharedPair | None) -> Term:
        assert pair is not None, "the manifest has a pair where a term is shared"
        return Term(pair.a[:inputs], pair.b[:, :outputs], entry.c, d, e, Owner.SHARED, Owner.SHARED, pair)

    return on_pair


def _pair(
    manifest: Manifest, entry: PairEntry, tensors: Tensors, projections: dict[str, Projection], base: BaseModel
) -> SharedPair:
    sharing = [p for name, p in projections.items() if any(t.shared for t in manifest.members[name].terms)]
    widest = max((p.in_features for p in sharing), default=1), max((p.out_features for p in sharing), default=1)
    size = entry.inputs, entry.outputs
    drawn = entry.drawn_from is not None
    if (drawn and size != widest) or any(have < need for have, need in zip(size, widest, strict=True)):
        raise Refusal(
            Code.COMPILED_MANIFEST,
            f"{MANIFEST_FILE}: pair: it is made for {size[0]} inputs and {size[1]} outputs, but the widest projections "
            f"on it have {widest[0]} and {widest[1]}. Compile the adapter again.",
        )
    shape_a, shape_b = (entry.rank, entry.inputs), (entry.outputs, entry.rank)
    if entry.drawn_from is None:
        return pair_of(tensors.take("pair.A", *shape_a), tensors.take("pair.B", *shape_b))
    if tensors.has_values and not tensors.reasons.found:
        return drawn_pair(entry.drawn_from, shape_a, shape_b, base.dtype)
    return pair_of(torch.empty(shape_a, device="meta"), torch.empty(shape_b, device="meta"))

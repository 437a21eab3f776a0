"""Paths that name a stack, `scute+stack:["/first", "/second"]`, and the folders behind one, compiled together."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from scute.admission.base import BaseModel, Projection
from scute.admission.compile import check_alone, read_form
from scute.admission.gated import onto_up_projections
from scute.admission.methods.oft import MAX_WIDTH
from scute.admission.reasons import Reasons
from scute.algebra.form import AdapterForm, Member
from scute.algebra.rotations import composed_width
from scute.algebra.stack import Obstacle, obstacle, stack_forms
from scute.errors import Code, Refusal

PREFIX = "scute+stack:"
MOST = 16
"""Adapters of a stack: each is read in full before the next."""
CODES = {Obstacle.BIAS: Code.STACK_BIAS, Obstacle.ROTATION: Code.STACK_ROTATION}


def is_stack(path: str) -> bool:
    """Whether a path names a stack; any other path names one adapter."""
    return path.startswith(PREFIX)


def folders_of(path: str) -> tuple[str, ...]:
    """Every folder (or repository) that serving this path reads, in the order in which they are applied.

    One that is no stack is its own folder. Refuses STACK_PATH.
    """
    if not is_stack(path):
        return (path,)
    try:
        names = json.loads(path.removeprefix(PREFIX))
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or len(names) < 2 or not all(isinstance(n, str) and n for n in names):
        raise Refusal(
            Code.STACK_PATH,
            f'{path!r} is no stack. After {PREFIX} there is a JSON array of two or more paths: {PREFIX}["/a", "/b"].',
        )
    if len(names) > MOST:
        raise Refusal(Code.STACK_PATH, f"a stack of {len(names)} adapters is not served; at most {MOST} are.")
    if any(is_stack(name) for name in names):
        raise Refusal(Code.STACK_PATH, f"{path!r} has a stack within a stack; name all folders in one array, in order.")
    return tuple(names)


def stack_path(folders: Sequence[str | Path]) -> str:
    """The path that names these folders, applied in this order."""
    return PREFIX + json.dumps([str(folder) for folder in folders])


def compile_stack(folders: Sequence[Path], base: BaseModel) -> tuple[AdapterForm, ...]:
    """The normal forms of adapters that are applied in order, the first first. Of one folder, `compile_adapter`'s.

    `one_adapter` makes one of them as soon as their magnitudes are resolved. Raises Refusal: those of each folder, and
    `stack.` where two of them have no stack that an engine can serve.
    """
    forms = find_stack(folders, base, Reasons())
    assert forms is not None, "reasons that are not collected are raised"
    return forms


def find_stack(
    folders: Sequence[Path], base: BaseModel, reasons: Reasons, *, values: bool = True
) -> tuple[AdapterForm, ...] | None:
    """`compile_stack` with the refusals where `reasons` puts them, as `find_form` does it for a folder."""
    forms = read_forms(folders, base, reasons, values=values)
    if forms is None:
        return None
    moved = onto_up_projections(forms, base)
    return moved if check_stack(folders, moved, reasons) else None


def read_forms(
    folders: Sequence[Path], base: BaseModel, reasons: Reasons, *, values: bool = True
) -> tuple[AdapterForm, ...] | None:
    """The adapters, with every slot on the projection that it was trained on; `check_stack` says if they stack."""
    forms = []
    for number, folder in enumerate(folders):
        own = Reasons(collect=reasons.collects)
        with naming(folders, number):
            form = read_form(folder, base, own, values=values)
        for refusal in own.found:
            reasons.add(_named(refusal, folders, number))
        reasons.left_out += own.left_out
        if form is not None:
            forms.append(form)
    return tuple(forms) if len(forms) == len(folders) else None


def check_stack(folders: Sequence[Path], forms: Sequence[AdapterForm], reasons: Reasons) -> bool:
    """Whether one member a projection computes all of them; refuses the codes of `stack.` otherwise."""
    num_reasons = len(reasons.found)
    for refusal in _obstacles([folder.name for folder in folders], forms):
        reasons.add(refusal)
    return len(reasons.found) == num_reasons


def one_adapter(forms: Sequence[AdapterForm], base: BaseModel) -> AdapterForm:
    """`algebra.stack_forms` of adapters whose magnitudes are resolved, without factors of a bias that is not there."""
    whole = stack_forms(forms)
    members = {name: _without_idle_factor(member, base.projections[name]) for name, member in whole.members.items()}
    return replace(whole, members=members)


def _without_idle_factor(member: Member, projection: Projection) -> Member:
    if projection.has_bias or member.bias.replaced is not None:
        return member
    return replace(member, bias=replace(member.bias, factor=None))


def check_each_alone(folders: Sequence[Path], reasons: Reasons) -> None:
    """Collect what is wrong with the folders whatever the base model is."""
    for number, folder in enumerate(folders):
        own = Reasons(collect=True)
        check_alone(folder, own)
        for refusal in own.found:
            reasons.add(_named(refusal, folders, number))
        reasons.left_out += own.left_out


@contextmanager
def naming(folders: Sequence[Path], number: int) -> Iterator[None]:
    """A refusal says which adapter of a stack it is about, counted from 0; it stays as it is if there is one alone."""
    try:
        yield
    except Refusal as refusal:
        if len(folders) == 1:
            raise
        raise _named(refusal, folders, number) from refusal


def _named(refusal: Refusal, folders: Sequence[Path], number: int) -> Refusal:
    if len(folders) == 1:
        return refusal
    return refusal.of(f"adapter {number + 1} of the stack, {folders[number].name!r}")


def _obstacles(names: Sequence[str], forms: Sequence[AdapterForm]) -> Iterator[Refusal]:
    sharing = [name for name, form in zip(names, forms, strict=True) if any(map(_shares, form.members.values()))]
    if len(sharing) > 1:
        yield Refusal(
            Code.STACK_SHARED,
            f"{sharing[0]!r} and {sharing[1]!r} both have shared factors (VeRA), and the engine keeps one pair an "
            "adapter. Convert all but one to LoRA at their own rank, which is exact (scute convert).",
        )
    for projection in dict.fromkeys(name for form in forms for name in form.members):
        here = [(n, f.members[projection]) for n, f in zip(names, forms, strict=True) if projection in f.members]
        yield from _obstacles_on(projection, here)


def _obstacles_on(projection: str, members: Sequence[tuple[str, Member]]) -> Iterator[Refusal]:
    for index, (second_name, second) in enumerate(members):
        for first_name, first in members[:index]:
            found = obstacle(first, second)
            if found is not None:
                yield Refusal(
                    CODES[found],
                    f"{second_name!r} cannot be applied after {first_name!r} on {projection}: {found.value}. "
                    f"{REMEDIES[found]}",
                )
    width = composed_width(*(m.rotation.width for _, m in members if m.rotation is not None))
    if width > MAX_WIDTH:
        yield Refusal(
            Code.STACK_ROTATION,
            f"the input transforms of the stack on {projection} have blocks of {width} together, and at most "
            f"{MAX_WIDTH} can be served. Use block sizes that divide each other.",
        )


REMEDIES = {
    Obstacle.BIAS: "Train one of them with bias='none'.",
    Obstacle.ROTATION: "Convert the first to LoRA at its own rank, which is exact (scute convert).",
}


def refuse_open_magnitudes(names: Sequence[str], forms: Sequence[AdapterForm]) -> None:
    """Refuse STACK_MAGNITUDE for what a rank of an engine alone can stack: it holds the base weights."""
    for name, form in zip(names, forms, strict=True):
        for projection, member in form.members.items():
            if member.magnitude is not None and sum(projection in other.members for other in forms) > 1:
                raise Refusal(
                    Code.STACK_MAGNITUDE,
                    f"{name!r} has a magnitude on {projection}, where another adapter of the stack is too. Its s "
                    "follows from the weights that the engine holds, so no folder can hold the stack: serve it by its "
                    f"path, {PREFIX}[...].",
                )


def _shares(member: Member) -> bool:
    return any(term.pair is not None for term in member.terms)

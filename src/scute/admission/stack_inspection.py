"""A stack for a reader: what its adapters are together, and every reason against each of them and against the stack."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from scute.admission.base import BaseModel
from scute.admission.description import describe
from scute.admission.deviation import Deviation, deviations
from scute.admission.inspection import Base, Facts, Inspection, inspect_folder
from scute.admission.reasons import Reasons
from scute.admission.stacks import check_each_alone, find_stack, folders_of, is_stack, naming, one_adapter
from scute.admission.targets import refuse_output_head
from scute.algebra.form import AdapterForm, Member, column_norms


def inspect_path(path: Path, base: Base | None, *, deep: bool = False) -> Inspection:
    """Look at a folder, or at a path that names a stack; nothing in it raises."""
    if not is_stack(str(path)):
        return inspect_folder(path, base, deep=deep)
    reasons = Reasons(collect=True)
    names = reasons.attempt(folders_of, str(path))
    folders = [Path(name) for name in names or ()]
    if base is None:
        check_each_alone(folders, reasons)
        return _told(path, folders, None, None, reasons)
    forms = find_stack(folders, base.model, reasons, values=False) if folders else None
    if forms is not None and deep:
        forms = find_stack(folders, base.model, reasons)
    for number, form in enumerate(forms or ()):
        reasons.attempt(_refuse_output_head, folders, number, form, base.model)
    return _told(path, folders, base, forms, reasons, deep=deep)


def _told(
    path: Path,
    folders: Sequence[Path],
    base: Base | None,
    forms: Sequence[AdapterForm] | None,
    reasons: Reasons,
    *,
    deep: bool = False,
) -> Inspection:
    parts = [inspect_folder(folder, base, deep=deep) for folder in folders]
    warnings = [f"{part.name}: {warning}" for part in parts for warning in part.warnings]
    form: AdapterForm | None = None
    layers: tuple[Deviation, ...] = ()
    if forms is not None and base is not None and not reasons.found:
        resolved = [_resolved(each, base, deep=deep) for each in forms]
        form = one_adapter([each for each, _ in resolved], base.model)
        if deep and all(is_known for _, is_known in resolved):
            layers = tuple(deviations(form, base.weight_of))
        elif deep:
            warnings.append("s of DoRA needs the base weights, which are not in the folder: no deviations")
    return Inspection(
        path,
        " + ".join(part.name for part in parts) or path.name,
        _facts([part.facts for part in parts]),
        sum(part.disk_bytes for part in parts),
        form,
        None if form is None else describe(form),
        layers,
        tuple(warnings),
        tuple(reasons.found),
        reasons.left_out,
    )


def _refuse_output_head(folders: Sequence[Path], number: int, form: AdapterForm, base: BaseModel) -> None:
    with naming(folders, number):
        refuse_output_head(form.members, base)


def _facts(parts: Sequence[Facts]) -> Facts:
    """What the adapters have together; a version or a base model that they do not agree on is left out."""
    versions, bases = {part.peft_version for part in parts}, {part.base for part in parts}
    return Facts(
        method=" + ".join(part.method or "unknown" for part in parts) or None,
        peft_version=versions.pop() if len(versions) == 1 else None,
        base=bases.pop() if len(bases) == 1 else None,
        targets=tuple(dict.fromkeys(target for part in parts for target in part.targets)),
    )


def _resolved(form: AdapterForm, base: Base, *, deep: bool) -> tuple[AdapterForm, bool]:
    """The form with an s in place of each magnitude, and whether it is the true one; which slots are live is known."""
    weights = {
        name: base.weight_of(name) if deep else None for name, m in form.members.items() if m.magnitude is not None
    }
    members = {name: _with_scale(m, weights.get(name)) for name, m in form.members.items()}
    return replace(form, members=members), all(weight is not None for weight in weights.values())


def _with_scale(member: Member, weight: Tensor | None) -> Member:
    if member.magnitude is None:
        return member
    norms = torch.ones_like(member.magnitude) if weight is None else column_norms(weight, member.terms)
    return member.resolve_magnitude(norms)

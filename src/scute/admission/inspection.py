"""A folder for a reader: what it is, what it compiles to, every reason against it, and what looks odd."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from scute.admission.base import BaseModel
from scute.admission.base_folder import BaseWeights
from scute.admission.checkpoint import read_config_file
from scute.admission.compile import check_alone, find_form
from scute.admission.compiled.manifest import MANIFEST_FILE, SourceEntry, is_compiled, read_manifest, tensor_file
from scute.admission.description import Description, describe
from scute.admission.deviation import Deviation, deviations
from scute.admission.methods.lora import MAX_RANK
from scute.admission.methods.registry import method_of
from scute.admission.reasons import Reasons
from scute.admission.targets import refuse_output_head
from scute.admission.tensors import CONFIG_FILE, PICKLE_FILE, TENSOR_FILE
from scute.algebra.form import AdapterForm
from scute.errors import Code, Refusal, printable


@dataclass(frozen=True, slots=True)
class Facts:
    """What the JSON of a folder says, as far as it can be read.

    base: name of the base model that it was trained on; targets: target_modules, or the last parts of the projections
    of a compiled folder; rank: r of the config.
    """

    method: str | None = None
    peft_version: str | None = None
    base: str | None = None
    targets: tuple[str, ...] = ()
    rank: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Inspection:
    """One folder, or a stack. form and description are None where it is refused, or no base model was given.

    folder: the path as it was given; name: the last part of it, or of each path of a stack. disk_bytes: of the file
    with the tensors; form: its tensors have no values unless the look was deep; reasons: why it is refused, the first
    being what an engine would say; reasons_left_out: how many more there are.
    """

    folder: Path
    name: str
    facts: Facts
    disk_bytes: int
    form: AdapterForm | None
    description: Description | None
    deviations: tuple[Deviation, ...]
    warnings: tuple[str, ...]
    reasons: tuple[Refusal, ...]
    reasons_left_out: int = 0


@dataclass(frozen=True, slots=True)
class Base:
    """The base model to inspect for. folder: for its name, and for its weights if the look is deep."""

    model: BaseModel
    folder: Path

    def weight_of(self, name: str) -> Tensor | None:
        """The weight [in, out] of a projection, None where the folder has none that can be read."""
        try:
            return BaseWeights(self.folder).read(name, self.model.projections[name])
        except (Refusal, OSError, ValueError, KeyError):  # whatever is wrong with the base, the adapter is looked at
            return None


def inspect_folder(folder: Path, base: Base | None, *, deep: bool = False) -> Inspection:
    """Look at one folder; nothing in it raises.

    Without a base model, only what the folder alone decides is checked. deep: read the values of the tensors too, where
    their headers are good, and those of the base weights that DoRA's s needs.
    """
    reasons, facts = Reasons(collect=True), read_facts(folder)
    warnings = list(_other_base(facts, base))
    form: AdapterForm | None = None
    layers: tuple[Deviation, ...] = ()
    if base is None:
        check_alone(folder, reasons)
    else:
        form = _served(find_form(folder, base.model, reasons, values=False), base.model, reasons)
        if form is not None and deep:
            form = _served(find_form(folder, base.model, reasons), base.model, reasons)
        if form is not None and deep:
            layers = tuple(deviations(form, base.weight_of))
            warnings += _dead(tensor_file(folder))
    description = None if form is None else describe(form)
    found = tuple(reasons.found)
    name, size = folder.name, _size(folder)
    return Inspection(folder, name, facts, size, form, description, layers, tuple(warnings), found, reasons.left_out)


def _served(form: AdapterForm | None, base: BaseModel, reasons: Reasons) -> AdapterForm | None:
    """The form, unless no engine serves what it adapts, however it was started."""
    if form is not None:
        reasons.attempt(refuse_output_head, form.members, base)
        reasons.attempt(_refuse_long_ranks, form)
    return None if reasons.found else form


def _refuse_long_ranks(form: AdapterForm) -> None:
    if form.max_rank > MAX_RANK:
        raise Refusal(
            Code.CAPACITY_RANK,
            f"it has rank {form.max_rank}, and an engine serves at most {MAX_RANK}; convert it with scute convert.",
        )


def adapters_in(paths: Iterable[Path]) -> Iterator[Path]:
    """The adapter folders that the paths name: each path itself, or its subfolders that hold files of an adapter."""
    for path in paths:
        try:
            found = [] if _has_files(path) else sorted(filter(_has_files, path.iterdir()))
            inside = [each for each in found if not each.name.startswith(".")]  # what a run that was killed has left
        except OSError:  # the inspection says what is wrong with it
            inside = []
        yield from inside or [path]


def read_facts(folder: Path) -> Facts:
    """What the JSON says; a field that is missing or of another type is left out."""
    try:
        if is_compiled(folder):
            manifest = read_manifest(folder)
            version = manifest.source.peft_version if isinstance(manifest.source, SourceEntry) else None
            parts = tuple(dict.fromkeys(printable(name.rpartition(".")[2]) for name in manifest.members))
            named = manifest.base.folder
            return Facts(
                printable(manifest.method),
                None if version is None else printable(version),
                None if named is None else printable(named),
                parts,
            )
        raw = read_config_file(folder / CONFIG_FILE)
    except (Refusal, OSError):
        return Facts()
    reasons = Reasons(collect=True)
    method = reasons.attempt(method_of, raw)
    targets = raw.get("target_modules")
    return Facts(
        method=_text(raw.get("peft_type")) if method is None else method.name,
        peft_version=_text(raw.get("peft_version")),
        base=_text(raw.get("base_model_name_or_path")) or None,
        targets=_names(targets),
        rank=raw["r"] if isinstance(raw.get("r"), int) else None,
    )


def _names(targets: Any) -> tuple[str, ...]:
    """PEFT writes a set, in any order."""
    names = sorted(map(str, targets)) if isinstance(targets, list) else [str(targets)] * bool(targets)
    return tuple(map(printable, names))


def _text(value: Any) -> str | None:
    return printable(value) if isinstance(value, str) else None


def _has_files(folder: Path) -> bool:
    return any(os.path.exists(folder / name) for name in (CONFIG_FILE, TENSOR_FILE, PICKLE_FILE, MANIFEST_FILE))


def _size(folder: Path) -> int:
    try:
        return tensor_file(folder).stat().st_size
    except OSError:
        return 0


def _other_base(facts: Facts, base: Base | None) -> Iterator[str]:
    """Names may differ for one model, and be equal for two, so it is no more than a warning."""
    if base is not None and facts.base is not None:
        trained, given = Path(facts.base).name, base.folder.resolve().name
        if trained.casefold() != given.casefold():
            yield f"it was trained on {trained!r} and this base model is {given!r}"


def _dead(path: Path) -> Iterator[str]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            if not file.get_tensor(name).any():
                yield f"{name} is all zero"

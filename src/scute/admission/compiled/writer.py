"""From members to a compiled folder: safetensors and a manifest, all of it or nothing."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import save_file

from scute import __version__
from scute.admission.base import BaseModel
from scute.admission.compiled.layout import entry_of, named_tensors, only_pair, pair_entry, plain
from scute.admission.compiled.manifest import (
    FORMAT,
    MANIFEST_FILE,
    WEIGHTS_FILE,
    BaseEntry,
    Manifest,
    SourceEntry,
    WeightsEntry,
    is_compiled,
    read_manifest,
)
from scute.admission.compiled.reader import read_folder
from scute.admission.output import check_output, whole_folder
from scute.admission.reasons import Reasons
from scute.admission.stacks import check_stack, one_adapter, read_forms, refuse_open_magnitudes
from scute.admission.targets import refuse_output_head
from scute.admission.tensors import CONFIG_FILE, TENSOR_FILE
from scute.algebra.form import AdapterForm, Member


def compile_folder(
    source: Path | Sequence[Path],
    out: Path,
    base: BaseModel,
    *,
    base_name: str | None = None,
    force: bool = False,
) -> None:
    """Compile the PEFT folder `source` for `base` and write the result to `out`.

    source: several folders are a stack, applied in this order, and may be compiled ones. Raises Refusal for what is
    wrong with a source and for a stack that no folder can hold, and what `write_folder` raises.
    """
    sources = [Path(source)] if isinstance(source, str | Path) else [Path(each) for each in source]
    if len(sources) == 1 and is_compiled(sources[0]):
        raise ValueError(f"{sources[0].name!r} is a compiled folder already: copy it")
    form = _read(sources, base)
    origins = [_origin(each) for each in sources]
    write_folder(
        out,
        form.members,
        base,
        method=form.method,
        source=origins[0] if len(origins) == 1 else origins,
        base_name=base_name,
        kept=sources,
        force=force,
    )


def _read(sources: Sequence[Path], base: BaseModel) -> AdapterForm:
    """The adapter, or the stack as one adapter, with every slot on the projection that it was trained on."""
    reasons = Reasons()
    forms = read_forms(sources, base, reasons)
    assert forms is not None, "reasons that are not collected are raised"
    check_stack(sources, forms, reasons)
    refuse_open_magnitudes([each.name for each in sources], forms)
    return one_adapter(forms, base)


def _origin(source: Path) -> SourceEntry:
    if is_compiled(source):
        before = read_manifest(source).source
        version, names = before.peft_version if isinstance(before, SourceEntry) else None, (MANIFEST_FILE, WEIGHTS_FILE)
    else:
        found = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8")).get("peft_version")
        version, names = found if isinstance(found, str) else None, (CONFIG_FILE, TENSOR_FILE)
    digests = {name: file_digest(source / name) for name in names}
    return SourceEntry(folder=source.resolve().name, peft_version=version, sha256=digests)


def write_folder(
    out: Path,
    members: Mapping[str, Member],
    base: BaseModel,
    *,
    method: str,
    source: SourceEntry | list[SourceEntry] | None = None,
    base_name: str | None = None,
    kept: Sequence[Path] = (),
    force: bool = False,
) -> None:
    """Write a compiled folder, which the engine serves like a PEFT folder.

    members: projection name, as "model.layers.0.self_attn.q_proj", to its member, whose tensors keep their dtype.
    base: the model that they are for; base_name: what it is called. method: what a user reads, as "SSF". kept: folders
    that must not be replaced with `out`. force: replace a compiled folder that is there.

    The folder is written beside `out`, read back and then renamed, so that `out` is whole or not there. Raises
    FileExistsError; ValueError for members that the format has no place for; and Refusal for what an engine would
    refuse, as a tensor of a wrong shape or a member on the output head.
    """
    out = Path(out)
    if not members:
        raise ValueError("there are no members to write")
    check_output(out, (MANIFEST_FILE, WEIGHTS_FILE), force=force, kept=kept)
    refuse_output_head(members, base)
    pair = only_pair(members)
    with whole_folder(out) as partial:
        save_file({name: plain(tensor) for name, tensor in named_tensors(members, pair)}, partial / WEIGHTS_FILE)
        Manifest(
            format=FORMAT,
            scute=__version__,
            method=method,
            source=source,
            base=BaseEntry(
                folder=base_name, dtype=str(base.dtype).removeprefix("torch."), projections=base.fingerprint
            ),
            weights=WeightsEntry(sha256=file_digest(partial / WEIGHTS_FILE)),
            pair=pair_entry(pair),
            members={name: entry_of(member) for name, member in members.items()},
        ).write(partial)
        read_folder(partial, base, Reasons())


def file_digest(path: Path) -> str:
    """sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

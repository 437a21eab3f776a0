"""The conversion of one adapter folder to a LoRA folder, from end to end (paper, sections 4.2 and 6.2)."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from scute.admission.base import BaseModel
from scute.admission.compile import compile_adapter
from scute.admission.compiled.manifest import is_compiled
from scute.admission.output import check_output
from scute.admission.tensors import CONFIG_FILE, TENSOR_FILE
from scute.conversion.distillation import Distillation, remove_state
from scute.conversion.factors import refuse_biases
from scute.conversion.folder import FILES, write_lora
from scute.conversion.report import Conversion
from scute.conversion.run import Progress, Run
from scute.conversion.settings import Method, Settings

DORA_NOTE = "DoRA's A and B alone would leave its scale out; what is written approximates the whole update."
FITTED_NOTE = "The error was measured on the text that the factors were fitted on; on other text it may be larger."


def convert(
    folder: Path, out: Path, base: BaseModel, base_folder: Path, settings: Settings, progress: Progress
) -> Conversion:
    """Write the adapter in `folder` as the LoRA folder `out`; base_folder has the weights of `base`, in safetensors.

    progress is called with what comes next, the steps done and all steps of its kind. Raises Refusal for an adapter
    that admission refuses or that changes a bias, and for base weights that cannot be read; FileExistsError for an
    `out` that is kept; ValueError for text, and for a state of distillation, that cannot be used; OSError for files.
    """
    if is_compiled(folder):
        raise ValueError(f"{folder} is a compiled folder; convert the adapter that it was compiled from")
    check_output(out, FILES, force=settings.force, kept=(folder, base_folder))
    state = out.with_name(f".{out.name}.distill")
    if settings.method is not Method.SVD and settings.data is None:
        raise ValueError(f"{settings.method} is fitted on text, and none is given; name a file of it with --data")
    form = compile_adapter(folder, base)
    for module, member in form.members.items():
        refuse_biases(module, member, base.projections[module])
    run = Run(form, base, base_folder, settings, progress)
    terms = run.factors()
    if settings.method is Method.DISTILL:
        key = _key(folder, base_folder, settings, run.prompts)
        terms |= run.distilled(terms, Distillation(settings.training, state, key))
    layers = tuple(run.layers(terms))
    agreed = run.agreement(terms) if settings.measured else None
    named = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8")).get("base_model_name_or_path")
    write_lora(out, terms, base, named if named and isinstance(named, str) else str(base_folder))
    if settings.method is Method.DISTILL:
        remove_state(state)
    measured_on = str(settings.data or "random tokens")
    return Conversion(form.method, layers, agreed, measured_on, tuple(_notes(form.method, settings, run)))


def _notes(method: str, settings: Settings, run: Run) -> Iterator[str]:
    if method == "DoRA":
        yield DORA_NOTE
    if settings.method is not Method.SVD and settings.measured and run.inexact:
        yield FITTED_NOTE


def _key(folder: Path, base_folder: Path, settings: Settings, prompts: Sequence[Sequence[int]]) -> str:
    """What a state of distillation must agree with to be continued: adapter, base, rank, training and text."""
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, TENSOR_FILE):
        digest.update((folder / name).read_bytes())
    digest.update(repr((str(base_folder.resolve()), settings.rank, settings.training, prompts)).encode())
    return digest.hexdigest()

"""The admission compiler: from a folder that PEFT or Scute saved to the normal form, exactly or not at all."""

from pathlib import Path

from scute.admission.base import BaseModel
from scute.admission.biases import bias_only_members
from scute.admission.checkpoint import Checkpoint, open_checkpoint
from scute.admission.compiled.manifest import is_compiled
from scute.admission.compiled.reader import check_files, read_folder
from scute.admission.config import read_config
from scute.admission.copies import drop_copies, take_modules_to_save
from scute.admission.gated import onto_up_projections
from scute.admission.methods.registry import method_of
from scute.admission.reasons import Reasons
from scute.admission.sites import find_sites, module_of, modules_in
from scute.admission.targets import check_targets
from scute.admission.text_model import named_as_trained
from scute.algebra.form import AdapterForm


def compile_adapter(folder: Path, base: BaseModel) -> AdapterForm:
    """The normal form of the adapter in `folder` on `base`. Every field and every tensor that matters is used once.

    Tensors are on the CPU in the dtype of the file. Raises Refusal, and nothing else for anything in the folder.
    """
    form = find_form(Path(folder), base, Reasons())
    assert form is not None, "reasons that are not collected are raised"
    return form


def find_form(folder: Path, base: BaseModel, reasons: Reasons, *, values: bool = True) -> AdapterForm | None:
    """`compile_adapter` with the refusals where `reasons` puts them; the form is None if one was collected.

    values: False reads the headers of tensors alone, so that the tensors of the form are on the meta device.
    """
    form = read_form(folder, base, reasons, values=values)
    return None if form is None else onto_up_projections([form], base)[0]


def read_form(folder: Path, base: BaseModel, reasons: Reasons, *, values: bool = True) -> AdapterForm | None:
    """`find_form` with every slot on the projection that it was trained on: what stacks and compiled folders need."""
    if is_compiled(folder):
        form = read_folder(folder, base, reasons, values=values)
    else:
        checkpoint = open_checkpoint(folder, reasons, values=values)
        form = None if checkpoint is None else compile_checkpoint(checkpoint, base)
    return None if reasons.found else form


def check_alone(folder: Path, reasons: Reasons) -> None:
    """Collect what is wrong with a folder whatever the base model is: its files, its config, the spelling of names."""
    if is_compiled(folder):
        check_files(folder, reasons)
        return
    checkpoint = open_checkpoint(folder, reasons, values=False)
    method = None if checkpoint is None else reasons.attempt(method_of, checkpoint.config)
    if checkpoint is not None and method is not None:
        reasons.attempt(method.check, checkpoint.config, checkpoint.tensors)
        whole = take_modules_to_save(checkpoint.config.get("modules_to_save"), checkpoint.tensors)
        read_config(method.config, checkpoint.config, reasons, {"modules_to_save": whole})
        for name in checkpoint.tensors.names:
            if name not in method.shared:
                reasons.attempt(module_of, name, method.suffixes, None)


def compile_checkpoint(checkpoint: Checkpoint, base: BaseModel) -> AdapterForm | None:
    """The normal form of an open checkpoint. What depends on something that was refused is not judged."""
    tensors, reasons = checkpoint.tensors, checkpoint.tensors.reasons
    method = reasons.attempt(method_of, checkpoint.config)
    if method is None:
        return None
    reasons.attempt(method.check, checkpoint.config, tensors)
    whole = take_modules_to_save(checkpoint.config.get("modules_to_save"), tensors)
    config = read_config(method.config, checkpoint.config, reasons, {"modules_to_save": whole})
    base, names = named_as_trained(modules_in(tensors, method.suffixes), base)
    num_reasons = len(reasons.found)
    drop_copies(tensors, base, biases=getattr(config, "bias", "none") == "none")
    sites = find_sites(tensors, method.suffixes, method.shared, base)
    if config is None:
        return None
    if len(reasons.found) == num_reasons:  # a tensor with a wrong name may be the one that a target lacks
        reasons.attempt(check_targets, config, sites, base, reasons)
    members = reasons.attempt(method.build, config, sites, base, tensors) if sites else None
    if members is None:
        return None
    if getattr(config, "bias", "none") == "all":
        members |= bias_only_members(tensors, sites, base)
    tensors.refuse_left_overs()
    reasons.attempt(tensors.refuse_changes)
    return AdapterForm(method.name, {names[module]: member for module, member in members.items()})

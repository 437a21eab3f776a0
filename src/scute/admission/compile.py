"""The admission compiler: from a folder that PEFT saved to the normal form, exactly or not at all."""

from pathlib import Path

from scute.admission.base import BaseModel
from scute.admission.biases import bias_only_members
from scute.admission.checkpoint import open_checkpoint
from scute.admission.config import read_config
from scute.admission.methods.registry import method_of
from scute.admission.sites import find_sites
from scute.admission.targets import check_targets
from scute.algebra.form import AdapterForm


def compile_adapter(folder: Path, base: BaseModel) -> AdapterForm:
    """The normal form of the adapter in `folder` on `base`. Every field and every tensor that matters is used once.

    Tensors are on the CPU in the dtype of the file. Raises Refusal, and nothing else for anything in the folder.
    """
    checkpoint = open_checkpoint(Path(folder))
    method = method_of(checkpoint.config)
    method.check(checkpoint.config, checkpoint.tensors)
    config = read_config(method.config, checkpoint.config)
    sites = find_sites(checkpoint.tensors, method.suffixes, method.shared, base)
    check_targets(config, sites, base)
    members = method.build(config, sites, base, checkpoint.tensors)
    if getattr(config, "bias", "none") == "all":
        members |= bias_only_members(checkpoint.tensors, sites, base)
    checkpoint.tensors.refuse_left_overs()
    return AdapterForm(method.name, members)

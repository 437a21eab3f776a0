"""Whole weights that PEFT saves beside an adapter: dropped where they equal the base model's, refused where not.

PEFT 0.21.2, `get_peft_model_state_dict`: the embedding and the output head, as `<module>.base_layer.weight` where they
are adapted and as `<module>.weight` where not (save_embedding_layers, or a vocabulary that was resized), and every
tensor of the modules in modules_to_save.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from scute.admission.base import BaseModel
from scute.admission.sites import PREFIX
from scute.admission.tensors import Tensors
from scute.errors import Code, Refusal

MOST = 100
"""Names of modules_to_save that the file is searched for."""
REMEDY = (
    "A batch shares that weight, so another cannot be served: train without it, or merge the adapter into the base "
    "model. If it was not trained, save with save_embedding_layers=False."
)


def take_modules_to_save(names: Any, tensors: Tensors) -> str:
    """Take the tensors of the modules in modules_to_save; a sentence with their size, empty if there are none.

    The config is refused for them, and the sentence goes there.
    """
    wanted = [f".{name}." for name in names[:MOST] if isinstance(name, str)] if isinstance(names, list) else []
    found = [name for name in tensors.names if any(part in f".{name}" for part in wanted)]
    if not found:
        return ""
    shown = f"{found[0]} {list(tensors.shape(found[0]))}"
    size = sum(tensors.num_bytes(name) for name in found)
    for name in found:
        tensors.discard(name)
    return f"The file has {readable(size)} of them, {shown}{' and more' * (len(found) > 1)}."


def drop_copies(tensors: Tensors, base: BaseModel, *, biases: bool) -> None:
    """Take the copies of the embedding and of the head. Refuses MODULE_UNSUPPORTED for one that is not the base's own.

    biases: whether a bias of the head is a copy too, and not one that the config says was trained. Without values, as
    of a file whose header alone was read, the shape decides.
    """
    for module, leaf, shape in _parameters(base):
        if leaf == "weight" or biases:
            for name in (f"{PREFIX}{module}.{leaf}", f"{PREFIX}{module}.base_layer.{leaf}"):
                if name in tensors:
                    _take(tensors, name, f"{module}.{leaf}", shape, base)


def _parameters(base: BaseModel) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Module, name and shape of every parameter that PEFT may save a copy of."""
    for module, size in base.embeddings.items():
        yield module, "weight", size
    if base.output_head is not None and base.output_head in base.projections:
        head = base.projections[base.output_head]
        yield base.output_head, "weight", (head.out_features, head.in_features)
        if head.has_bias:
            yield base.output_head, "bias", (head.out_features,)


def _take(tensors: Tensors, name: str, parameter: str, shape: tuple[int, ...], base: BaseModel) -> None:
    size, found = readable(tensors.num_bytes(name)), tensors.shape(name)
    if found != shape:
        tensors.discard(name)
        what = f"with shape {list(found)} where the base model has {list(shape)}"
    else:
        what = _difference(tensors.take(name, *shape), parameter, base)
    if what:
        sentence = f"{name} is a whole copy of {parameter} ({size}) {what}. {REMEDY}"
        tensors.reasons.add(Refusal(Code.MODULE_UNSUPPORTED, sentence))


def _difference(copy: Tensor, parameter: str, base: BaseModel) -> str:
    """In what the copy is not the base model's parameter; empty if it is, or if it has no values."""
    if copy.is_meta:
        return ""
    stored = None if base.read_weight is None else base.read_weight(parameter)
    if stored is None or stored.shape != copy.shape:
        return "that cannot be held against the base model, whose weights are not in a folder of safetensors here"
    # For training, the base model may have been loaded in another dtype than that of its file: the copy's.
    differs = (copy != stored.to(copy.dtype)).reshape(len(copy), -1).any(dim=1)
    rows = int(differs.sum())
    return f"that was trained: {rows} of its {len(copy)} rows differ from the base model's" if rows else ""


def readable(size: int) -> str:
    """A number of bytes as text."""
    return f"{size:,} bytes" if size < 2**20 else f"{size / 2**20:,.1f} MiB"

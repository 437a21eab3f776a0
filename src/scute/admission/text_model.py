"""The language model inside a multimodal wrapper, by the names that an adapter of the language model alone has for it.

A wrapper of transformers 5 has its language model at `model.language_model.`; a wrapper of transformers before 4.52 and
a model of text alone call the same layers otherwise. Both trees hold the same projections, so that the adapter is
compiled against the wrapper with the names that it was trained with, and its members are renamed at the end.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from scute.admission.base import BaseModel

SPELLINGS = (
    "model.language_model.",
    "language_model.model.",
    "model.text_model.",
    "text_model.model.",
    "language_model.",
    "text_model.",
    "model.",
)
"""What is in front of "layers." of a language model, a wrapper's spellings first."""
Value = TypeVar("Value")


def named_as_trained(modules: Iterable[str], base: BaseModel) -> tuple[BaseModel, Mapping[str, str]]:
    """The language model of `base` under the names of `modules`, and the names in `base` of its projections.

    It is `base` itself where it has all of the modules, or where these do not have one spelling.
    """
    modules = set(modules)
    here = _spelling(base.projections)
    there = _spelling(modules)
    if modules <= base.projections.keys() or here is None or there is None or here == there:
        return base, {name: name for name in base.projections}
    names = {name: there + name.removeprefix(here) for name in base.projections if name.startswith(here)}
    if base.output_head is not None:
        names[base.output_head] = _head(modules, base.output_head)
    return _renamed(base, names, here, there), {new: old for old, new in names.items()}


def _spelling(modules: Iterable[str]) -> str | None:
    """The one spelling that the modules have; None for none or for several."""
    found = {spelling for name in modules for spelling in SPELLINGS if name.startswith(f"{spelling}layers.")}
    return found.pop() if len(found) == 1 else None


def _head(modules: Iterable[str], head: str) -> str:
    leaf = head.rpartition(".")[2]
    return next((name for name in sorted(modules) if name.rpartition(".")[2] == leaf), leaf)


def _renamed(base: BaseModel, names: Mapping[str, str], here: str, there: str) -> BaseModel:
    def renamed(values: Mapping[str, Value]) -> dict[str, Value]:
        return {there + name.removeprefix(here): value for name, value in values.items() if name.startswith(here)}

    original = {new: old for old, new in names.items()}
    read = base.read_weight

    def read_weight(name: str) -> Tensor | None:
        module, _, leaf = name.rpartition(".")
        old = original.get(module, here + module.removeprefix(there))
        return None if read is None else read(f"{old}.{leaf}")

    return replace(
        base,
        projections={names[name]: projection for name, projection in base.projections.items() if name in names},
        gated_up={names[down]: names[up] for down, up in base.gated_up.items() if down in names and up in names},
        output_head=None if base.output_head is None else names[base.output_head],
        embeddings=renamed(base.embeddings),
        read_weight=None if read is None else read_weight,
    )

"""Stacks of adapters that a server has loaded, by their names: each stands for the path that it was loaded from."""

from collections.abc import Mapping

from vllm.lora.request import LoRARequest

from scute.admission.stacks import folders_of, is_stack, stack_path
from scute.errors import Refusal

PATH_MARKS = ("/", ".", "~")
"""What starts with one of them is a path, whatever adapters are called."""


def with_paths(path: str, loaded: Mapping[str, LoRARequest]) -> str:
    """A `lora_path` with the folders of loaded adapters in place of their names; a stack among them is taken apart.

    A path that is no stack, or a wrong one, stays as it is: it is refused where it is read.
    """
    try:
        names = folders_of(path) if is_stack(path) else ()
    except Refusal:
        return path
    found = {name: loaded[name].lora_path for name in names if name in loaded and not name.startswith(PATH_MARKS)}
    if not found:
        return path
    return stack_path([folder for name in names for folder in folders_of(found.get(name, name))])

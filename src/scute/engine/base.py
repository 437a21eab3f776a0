"""What vLLM's model config says of the base model, and what a path is on it: no engine is needed for either."""

from pathlib import Path
from typing import Any

from scute.admission.base import BaseModel
from scute.admission.stacks import compile_stack, folders_of
from scute.errors import Incompatible


def base_model_of(model_config: Any) -> BaseModel:
    """The base model as PEFT sees it, in the dtype that it is served in. Raises Incompatible."""
    try:
        return BaseModel.from_config(model_config.hf_config, model_config.dtype)
    except ValueError as error:
        raise Incompatible(f"Scute does not know the projections of this model: {error}") from error


def check_folder(model_config: Any, path: str) -> None:
    """Compile the adapter, or the stack, and forget it. Raises Refusal for what the folders alone decide.

    A path that is no folder here is left to the engine, which may run elsewhere or fetch it.
    """
    folders = [Path(name) for name in folders_of(path)]
    if all(folder.is_dir() for folder in folders):
        compile_stack(folders, base_model_of(model_config))

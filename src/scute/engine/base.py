"""What vLLM's model config says of the base model, and what a path is on it: no engine is needed for either."""

import os
from typing import Any

from scute.admission.base import BaseModel
from scute.admission.stacks import compile_stack, folders_of
from scute.engine.options import Options
from scute.engine.sources import locate
from scute.errors import Incompatible


def base_model_of(model_config: Any) -> BaseModel:
    """The base model as PEFT sees it, in the dtype that it is served in. Raises Incompatible."""
    try:
        return BaseModel.from_config(model_config.hf_config, model_config.dtype)
    except ValueError as error:
        raise Incompatible(f"Scute does not know the projections of this model: {error}") from error


def check_folder(vllm_config: Any, path: str) -> None:
    """Compile the adapter, or the stack, and forget it. Raises Refusal for what its path and its files alone decide.

    A full path where no folder is here is left to the engine, which may run elsewhere.
    """
    options = Options.read(vllm_config)
    folders = [locate(name, options, fresh=True) for name in folders_of(path)]
    if all(os.path.isdir(folder) for folder in folders):
        compile_stack(folders, base_model_of(vllm_config.model_config))

"""What vLLM's model config says of the base model, and what a path is on it: no engine is needed for either."""

import os
import threading
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from scute.admission.base import BaseModel
from scute.admission.base_folder import weight_reader
from scute.admission.stacks import compile_stack, folders_of
from scute.engine.options import Options
from scute.engine.sources import locate
from scute.errors import Incompatible


def base_model_of(model_config: Any) -> BaseModel:
    """The base model as PEFT sees it, in the dtype that it is served in. Raises Incompatible."""
    try:
        base = BaseModel.from_config(model_config.hf_config, model_config.dtype)
    except ValueError as error:
        raise Incompatible(f"Scute does not know the projections of this model: {error}") from error
    folder = _weight_folder(model_config)
    return base if folder is None else base.with_weights(weight_reader(folder))


def _weight_folder(model_config: Any) -> Path | None:
    """The folder with the weights that vLLM serves, or None where they are no folder of this machine."""
    source = getattr(model_config, "model_weights", None) or model_config.model
    if Path(source).is_dir():
        return Path(source)
    try:
        return Path(snapshot_download(source, revision=model_config.revision, local_files_only=True))
    except (OSError, ValueError):  # not in the cache, or no name of a repository
        return None


def check_folder(vllm_config: Any, path: str) -> None:
    """Compile the adapter, or the stack, and forget it. Raises Refusal for what its path and its files alone decide.

    A full path where no folder is here is left to the engine, which may run elsewhere.
    """
    options = Options.read(vllm_config)
    folders = [locate(name, options, fresh=True) for name in folders_of(path)]
    if all(os.path.isdir(folder) for folder in folders):
        compile_stack(folders, _known_base(vllm_config.model_config))


_bases: dict[int, tuple[Any, BaseModel]] = {}
_making = threading.Lock()


def _known_base(model_config: Any) -> BaseModel:
    """`base_model_of`, once for a config: transformers builds modules for it, under a dtype that is the process's."""
    with _making:
        if id(model_config) not in _bases:
            _bases[id(model_config)] = (model_config, base_model_of(model_config))  # kept, so that its id is not reused
        return _bases[id(model_config)][1]

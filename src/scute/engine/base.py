"""What vLLM's model config says of the base model, and what a path is on it: no engine is needed for either."""

import os
import threading
from pathlib import Path
from typing import Any

from scute.admission.base import BaseModel
from scute.admission.base_folder import weight_reader
from scute.admission.stacks import compile_stack, folders_of
from scute.engine import hub
from scute.engine.options import Options
from scute.engine.sources import locate
from scute.errors import Incompatible


def base_model_of(model_config: Any, download_dir: str | None = None) -> BaseModel:
    """The base model as PEFT sees it, in the dtype that it is served in. Raises Incompatible.

    download_dir: of vLLM's load config, the cache that the weights are fetched to.
    """
    try:
        base = BaseModel.from_config(model_config.hf_config, model_config.dtype)
    except ValueError as error:
        raise Incompatible(f"Scute does not know the projections of this model: {error}") from error
    folder = _weight_folder(model_config, download_dir)
    return base if folder is None else base.with_weights(weight_reader(folder))


def _weight_folder(model_config: Any, download_dir: str | None) -> Path | None:
    """The folder with the weights that vLLM serves, or None where they are no folder of this machine."""
    source = getattr(model_config, "model_weights", None) or model_config.model
    return Path(source) if Path(source).is_dir() else hub.cached(source, model_config.revision, cache=download_dir)


def check_folder(vllm_config: Any, path: str) -> None:
    """Compile the adapter, or the stack, and forget it. Raises Refusal for what its path and its files alone decide.

    A full path where no folder is here is left to the engine, which may run elsewhere.
    """
    options = Options.read(vllm_config)
    folders = [locate(name, options, fresh=True) for name in folders_of(path)]
    if all(os.path.isdir(folder) for folder in folders):
        compile_stack(folders, _known_base(vllm_config))


_bases: dict[int, tuple[Any, BaseModel]] = {}
_making = threading.Lock()


def _known_base(vllm_config: Any) -> BaseModel:
    """`base_model_of`, once for a config: transformers builds modules for it, under a dtype that is the process's."""
    config = vllm_config.model_config
    with _making:
        if id(config) not in _bases:  # the config is kept, so that its id is not reused
            _bases[id(config)] = (config, base_model_of(config, vllm_config.load_config.download_dir))
        return _bases[id(config)][1]

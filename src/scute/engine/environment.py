"""What a bug report needs to know of the vLLM beside Scute: every symbol, what is wrong with it, and whose it is."""

import importlib.metadata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

import scute
from scute.engine import upstream
from scute.errors import Incompatible
from scute.kernels import sizes

PLUGINS = "vllm.general_plugins"

VARIABLES = (
    "VLLM_PLUGINS",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    "VLLM_LORA_RESOLVER_CACHE_DIR",
    "VLLM_LORA_RESOLVER_HF_REPO_LIST",
    "VLLM_LORA_ENABLE_DUAL_STREAM",
    "VLLM_LORA_DISABLE_PDL",
    "VLLM_BATCH_INVARIANT",
    "VLLM_USE_V2_MODEL_RUNNER",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_WORKER_MULTIPROC_METHOD",
    "VLLM_DISABLE_COMPILE_CACHE",
    "VLLM_CACHE_ROOT",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_OMP_THREADS_BIND",
    "PROMETHEUS_MULTIPROC_DIR",
    "XDG_CACHE_HOME",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TRITON_INTERPRET",
    "TRITON_CACHE_DIR",
    "OMP_NUM_THREADS",
)
"""Those that change what Scute or the engine does. Not all that start with VLLM_: some hold keys."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """One name of vLLM. check: signature, use or binding; problem: None where it is as Scute needs it."""

    name: str
    check: str
    problem: str | None


@dataclass(frozen=True, slots=True)
class Fit:
    """vllm: its version, None where there is none. problem: why Scute would not start, or None."""

    vllm: str | None
    problem: str | None
    symbols: tuple[Symbol, ...]


def fit(environment: Mapping[str, str]) -> Fit:
    """Check every symbol, then bind in this process, as a front end does, and look whose they are. Raises nothing.

    Nothing is bound where something does not fit.
    """
    try:
        version = upstream.vllm_version()
    except Incompatible as error:
        return Fit(None, str(error), ())
    symbols = tuple(_relied_on())
    problem = _start() or _left_out(environment)
    return Fit(version, problem, symbols + tuple(_bound()))


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of VARIABLES that are set."""
    return {name: environment[name] for name in VARIABLES if name in environment}


def plugins() -> dict[str, str]:
    """The plugins that vLLM would load, and the distribution of each."""
    found = importlib.metadata.entry_points(group=PLUGINS)
    return {each.name: f"{each.dist.name} {each.dist.version}" if each.dist else "unknown" for each in found}


def block_sizes() -> str:
    """The table that the sizes of the kernels' blocks come from here, or "by rule"."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        for folder in (sizes.user_folder(), sizes.PACKAGED):
            path = sizes.file_of(folder, device)
            if path.exists():
                return str(path)
    return "by rule"


def _start() -> str | None:
    try:
        import vllm.v1.engine.core  # noqa: F401  (so that all of it is there to be bound)

        from scute.engine import plugin

        plugin.register()
    except Incompatible as error:
        return str(error)
    except Exception as error:  # a report says what is broken, whatever it is
        return f"vLLM cannot be imported here: {type(error).__name__}: {error}"
    return None


def _left_out(environment: Mapping[str, str]) -> str | None:
    allowed = environment.get("VLLM_PLUGINS")
    if allowed is None or "scute" in allowed.split(","):
        return None
    return "VLLM_PLUGINS is set to a list without 'scute', so vLLM runs alone."


def _relied_on() -> Iterator[Symbol]:
    for path, expected in (upstream.SIGNATURES | upstream.FRONT_END_SIGNATURES).items():
        yield Symbol(path, "signature", upstream.difference(path, expected))
    for path, name in (upstream.USES | upstream.FRONT_END_USES).items():
        yield Symbol(path, "use", upstream.unused(path, name))


def _bound() -> Iterator[Symbol]:
    for path in upstream.BOUND:
        yield Symbol(path, "binding", None if is_scutes(upstream.resolve(path)) else f"{path} is not bound")


def is_scutes(value: Any) -> bool:
    """Whether a function, a class, or one of a tuple of classes was made by this package."""
    if isinstance(value, tuple):
        return any(is_scutes(each) for each in value)
    if isinstance(value, FunctionType):  # a wrapper has the name and the module of what it wraps
        return Path(value.__code__.co_filename).is_relative_to(Path(scute.__file__).parent)
    return getattr(value, "__module__", "").partition(".")[0] == "scute"

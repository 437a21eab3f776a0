"""What the commands are given: one tiny base model for all, and the adapters that a module lists in NAMES."""

from pathlib import Path

import pytest

from scute.testing.adapters import write_adapter
from scute.testing.oracle import load_base
from scute.testing.tiny import tiny_llama


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def pool(request, base, tmp_path_factory) -> Path:
    """A folder with the adapters' folders in it, and nothing else."""
    root, model = tmp_path_factory.mktemp("pool"), load_base(base)
    for name in request.module.NAMES:
        write_adapter(model, name, root / name)
    return root


@pytest.fixture(scope="module")
def folders(request, pool) -> dict[str, Path]:
    """Of the adapters by name."""
    return {name: pool / name for name in request.module.NAMES}

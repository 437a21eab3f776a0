"""The base models that conversions are tested on."""

from pathlib import Path

import pytest
import torch
from workshop import Workshop, workshop_of

from scute.testing.tiny import tiny_llama, tiny_prompts


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Workshop:
    root = tmp_path_factory.mktemp("tiny")
    return workshop_of(tiny_llama(root / "base"), root, tiny_prompts(8, 24))


@pytest.fixture(scope="session")
def demo(tmp_path_factory) -> Workshop:
    """The demo's model, if `make demo` has fetched it."""
    base = Path(__file__).parents[2] / ".cache" / "smollm2"
    if not base.exists():
        pytest.skip("make demo has not fetched its base model")
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(49152, (4, 32), generator=generator).tolist()
    return workshop_of(base, tmp_path_factory.mktemp("demo"), prompts)

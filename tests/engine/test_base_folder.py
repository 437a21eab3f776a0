"""Where the base model's own weights are, which copies beside an adapter are held against."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from scute.engine import base
from scute.testing.tiny import tiny_llama


def configured(model: str, pulled: str = "") -> Any:
    from transformers import LlamaConfig

    hf_config = LlamaConfig(hidden_size=128, intermediate_size=192, num_hidden_layers=2, vocab_size=256)
    return SimpleNamespace(model=model, model_weights=pulled, revision="main", hf_config=hf_config, dtype=torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("base"))


@pytest.fixture
def cached(monkeypatch, folder):
    """A cache of the hub that has one repository."""

    def snapshot_download(name: str, **_: Any) -> str:
        if name != "someone/tiny":
            raise LocalEntryNotFoundError("not in the cache")
        return str(folder)

    monkeypatch.setattr(base, "snapshot_download", snapshot_download)


@pytest.mark.usefixtures("cached")
def test_a_folder_or_a_repository_in_the_cache(folder):
    for config in [configured(str(folder)), configured("someone/tiny"), configured("elsewhere", str(folder))]:
        read = base.base_model_of(config).read_weight
        assert read is not None
        head = read("lm_head.weight")
        assert head is not None
        assert head.shape == (256, 128)
        assert read("model.nothing.weight") is None


@pytest.mark.usefixtures("cached")
def test_no_folder_at_all():
    assert base.base_model_of(configured("someone/other")).read_weight is None


@pytest.mark.parametrize("name", ["model.gguf", "s3://bucket/model", "../x"])
def test_what_is_no_name_of_a_repository(name: str):
    assert base.base_model_of(configured(name)).read_weight is None

"""Where the base model's own weights are, which copies beside an adapter are held against."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from scute.engine import base
from scute.testing.tiny import tiny_llama


def configured(model: str, pulled: str = "") -> Any:
    from transformers import LlamaConfig

    hf_config = LlamaConfig(hidden_size=128, intermediate_size=192, num_hidden_layers=2, vocab_size=256)
    return SimpleNamespace(model=model, model_weights=pulled, revision="main", hf_config=hf_config, dtype=torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("base"))


def write_cache(root: Path, folder: Path) -> Path:
    """A cache of the hub that has one repository, someone/tiny."""
    repository = root / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123")
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / "0123").symlink_to(folder)
    return root


@pytest.fixture
def cache(monkeypatch, folder, tmp_path) -> Path:
    """The hub's own."""
    root = write_cache(tmp_path / "hub", folder)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    return root


@pytest.mark.usefixtures("cache")
def test_a_folder_or_a_repository_in_the_cache(folder):
    for config in [configured(str(folder)), configured("someone/tiny"), configured("elsewhere", str(folder))]:
        read = base.base_model_of(config).read_weight
        assert read is not None
        head = read("lm_head.weight")
        assert head is not None
        assert head.shape == (256, 128)
        assert read("model.nothing.weight") is None


def test_the_folder_that_vllm_downloads_to(cache, folder, tmp_path):
    """And no other: there may be weights of the same name in the hub's own cache."""
    given, empty = write_cache(tmp_path / "given", folder), tmp_path / "empty"
    empty.mkdir()
    shutil.rmtree(cache)
    config = configured("someone/tiny")
    assert base.base_model_of(config).read_weight is None
    assert base.base_model_of(config, str(given)).read_weight is not None
    write_cache(cache, folder)
    assert base.base_model_of(config).read_weight is not None
    assert base.base_model_of(config, str(empty)).read_weight is None


def test_the_front_end_asks_with_the_folder_of_the_load_config(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(base, "base_model_of", lambda *given: asked.append(given))
    monkeypatch.setattr(base, "compile_stack", lambda *_: None)
    config = SimpleNamespace(
        additional_config={}, model_config=object(), load_config=SimpleNamespace(download_dir="/downloads")
    )
    base.check_folder(config, str(tmp_path))
    assert asked == [(config.model_config, "/downloads")]


@pytest.mark.usefixtures("cache")
def test_no_folder_at_all():
    assert base.base_model_of(configured("someone/other")).read_weight is None


@pytest.mark.parametrize("name", ["model.gguf", "s3://bucket/model", "../x"])
def test_what_is_no_name_of_a_repository(name: str):
    assert base.base_model_of(configured(name)).read_weight is None

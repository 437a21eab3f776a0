"""Adapters of the Hugging Face hub, with a hub that only remembers what it was asked."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scute.engine import hub
from scute.engine.adapter_files import FILES
from scute.engine.options import Options
from scute.engine.sources import locate
from scute.errors import Code, Refusal

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PEFT = {"adapter_config.json": 300, "adapter_model.safetensors": 5_000_000}


class Hub:
    """files: bytes by path, None where the hub does not say. Its cache keeps what was downloaded, by commit."""

    def __init__(self, root: Path, files: dict[str, int | None]) -> None:
        self.root, self.files = root, files
        self.asked: list[tuple[str, str | None]] = []
        self.downloads: list[list[str]] = []
        self.error: Exception | None = None

    def model_info(self, name: str, *, revision: str | None, files_metadata: bool, timeout: float) -> Any:
        assert files_metadata
        assert timeout > 0
        self.asked.append((name, revision))
        if self.error is not None:
            raise self.error
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=f, size=s) for f, s in self.files.items()])

    def snapshot_download(
        self,
        name: str,
        *,
        revision: str | None,
        allow_patterns: list[str],
        cache_dir: str | None = None,
        local_files_only: bool = False,
    ) -> str:
        assert cache_dir is None, "adapters are in the hub's own cache"
        snapshot = self.root / name / (revision or "main")
        if local_files_only:
            if not snapshot.exists():
                raise FileNotFoundError(name)
            return str(snapshot)
        if self.error is not None:
            raise self.error
        self.downloads.append(allow_patterns)
        for path in allow_patterns:
            (snapshot / path).parent.mkdir(parents=True, exist_ok=True)
            (snapshot / path).write_bytes(b"x")
        return str(snapshot)


@pytest.fixture
def the_hub(tmp_path, monkeypatch) -> Hub:
    hub._list_once.cache_clear()
    fake = Hub(tmp_path, {"README.md": 10, "optimizer.pt": 10**12, "adapter_model.bin": 10**12, **PEFT})
    monkeypatch.setattr(hub, "api", lambda: fake)
    return fake


def options(**given: Any) -> Options:
    return Options(allowed_repositories={"org/name": COMMIT}, **given)


def refusal_of(path: str, given: Options) -> Refusal:
    with pytest.raises(Refusal) as refusal:
        locate(path, given, fresh=True)
    return refusal.value


def test_a_repository_is_read_at_its_commit_and_only_what_is_needed(the_hub):
    folder = locate("org/name", options(), fresh=True)
    assert folder == the_hub.root / "org/name" / COMMIT
    assert the_hub.asked == [("org/name", COMMIT)]
    assert the_hub.downloads == [list(PEFT)]


def test_what_is_cached_at_a_commit_is_not_asked_for_again(the_hub):
    for fresh in (True, False, True):
        locate("org/name", options(), fresh=fresh)
    assert (len(the_hub.asked), len(the_hub.downloads)) == (1, 1)


def test_a_folder_of_a_repository(the_hub):
    the_hub.files = {f"tenants/7/{file}": size for file, size in PEFT.items()} | PEFT
    assert locate("org/name/tenants/7", options(), fresh=True) == the_hub.root / "org/name" / COMMIT / "tenants/7"
    assert the_hub.downloads == [[f"tenants/7/{file}" for file in PEFT]]


def test_a_compiled_repository(the_hub):
    the_hub.files = dict.fromkeys(FILES[2:], 100)
    locate("org/name", options(), fresh=True)
    assert the_hub.downloads == [list(FILES[2:])]


def test_folders_that_are_not_there_ask_the_hub_once(the_hub):
    for number in range(20):
        assert refusal_of(f"org/name/{number}", options()).code is Code.FOLDER_INCOMPLETE
    assert the_hub.asked == [("org/name", COMMIT)]
    assert the_hub.downloads == []


@pytest.mark.parametrize("path", ["org/other", "other/name", "org/names", "name"])
def test_another_repository_is_not_asked_for(the_hub, path: str):
    assert refusal_of(path, options()).code is Code.SOURCE_NOT_ALLOWED
    assert the_hub.asked == []


def test_a_large_one_is_refused_before_it_is_downloaded(the_hub):
    locate("org/name", options(adapter_file_gib=0.1), fresh=True)
    hub._list_once.cache_clear()
    the_hub.root /= "empty"
    assert refusal_of("org/name", options(adapter_file_gib=0.001)).code is Code.SOURCE_TOO_LARGE
    assert len(the_hub.downloads) == 1


def test_one_of_unknown_size_is_refused_where_there_is_a_limit(the_hub):
    the_hub.files["adapter_model.safetensors"] = None
    assert refusal_of("org/name", options(adapter_file_gib=1)).code is Code.SOURCE_TOO_LARGE
    assert the_hub.downloads == []
    locate("org/name", options(), fresh=True)


def test_a_pickle_is_not_downloaded(the_hub):
    del the_hub.files["adapter_model.safetensors"]
    assert refusal_of("org/name", options()).code is Code.FOLDER_PICKLE
    assert the_hub.downloads == []


def test_a_hub_that_cannot_be_reached(the_hub):
    the_hub.error = ConnectionError("no route")
    refusal = refusal_of("org/name", options())
    assert refusal.code is Code.FOLDER_MISSING
    assert "org/name" in str(refusal)


def test_a_download_that_breaks_off(the_hub):
    locate("org/name", options(), fresh=True)
    the_hub.error, the_hub.root = ConnectionError("reset"), the_hub.root / "empty"
    assert refusal_of("org/name", options()).code is Code.FOLDER_UNREADABLE


def test_without_options_a_hub_id_is_a_path_as_in_vllm(the_hub):
    """The front end asks the hub for the newest; the workers take what it has fetched."""
    for _ in range(2):
        assert locate("org/any", Options(), fresh=True) == the_hub.root / "org/any" / "main"
    assert the_hub.asked == [("org/any", None)] * 2
    locate("org/any", Options(), fresh=False)
    assert len(the_hub.asked) == 2


def test_without_a_network_what_is_cached_is_served(the_hub):
    locate("org/any", Options(), fresh=True)
    the_hub.error = ConnectionError("no route")
    assert locate("org/any", Options(), fresh=True) == the_hub.root / "org/any" / "main"


def test_the_client_is_the_hub_s():
    """The calls of the fake above, with their parameters."""
    import inspect

    client = hub.api()
    for name, parameters in {
        "model_info": ["revision", "files_metadata", "timeout"],
        "snapshot_download": ["revision", "allow_patterns", "cache_dir", "local_files_only"],
    }.items():
        assert set(parameters) <= set(inspect.signature(getattr(client, name)).parameters)

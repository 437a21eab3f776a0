"""Where adapters may come from: names, folders, links and sizes, refused before a file is opened."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scute.admission.stacks import stack_path
from scute.engine import hub
from scute.engine.adapter_files import FILES
from scute.engine.base import check_folder
from scute.engine.options import Options
from scute.engine.sources import check_name, find_folder, find_repository, locate
from scute.errors import Code, Refusal

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write(folder: Path, size: int = 100, files: tuple[str, ...] = FILES[:2]) -> Path:
    """A folder with files of these names; none is read here."""
    folder.mkdir(parents=True)
    for file in files:
        (folder / file).write_bytes(b"x" * size)
    return folder


@pytest.fixture
def root(tmp_path) -> Path:
    write(tmp_path / "secret")
    write(tmp_path / "adapters" / "tenant" / "one")
    write(tmp_path / "adapters-of-others" / "two")
    return tmp_path / "adapters"


@pytest.fixture
def options(root) -> Options:
    return Options(allowed_roots=(str(root),))


READ: list[str] = []


def note_reads(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and os.path.basename(str(arguments[0])) in FILES and str(arguments[1]).startswith("r"):
        READ.append(str(arguments[0]))


sys.addaudithook(note_reads)


@pytest.fixture(autouse=True)
def nothing_is_read():
    """Whatever is decided here is decided from names, links and sizes."""
    READ.clear()
    yield
    assert READ == []


def test_a_read_would_be_noticed(tmp_path):
    (write(tmp_path / "a") / FILES[0]).read_bytes()
    assert [os.path.basename(path) for path in READ] == [FILES[0]]
    READ.clear()


def refusal_of(path: str, options: Options) -> Refusal:
    with pytest.raises(Refusal) as refusal:
        locate(path, options, fresh=True)
    return refusal.value


GOOD = ["a", "tenant/one", "A-1_b.c", "_x", "9", "v1.2/latest", "a" * 200]
BAD = [
    "", ".", "..", "../secret", "a/../../secret", "a/..", "a/./b", "/etc", "//a", "a//b", "a/", "/", "~", "~root/x",
    "a\\b", "..\\secret", "a\0b", "a\n", "a b", "$HOME", "%2e%2e/secret", ".hidden", "a/.git", "-rf", "a/-b", "é",
    "s3://bucket/x", "C:/x", "a" * 201,
]  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_names(name: str):
    check_name(name, Options())


@pytest.mark.parametrize("name", BAD)
def test_names_that_break_the_rules(name: str):
    with pytest.raises(Refusal) as refusal:
        check_name(name, Options())
    assert refusal.value.code is Code.SOURCE_NAME
    assert str(refusal.value).isprintable()


def test_names_of_a_server():
    options = Options(allowed_names=r"tenant-\d+")
    check_name("tenant-12", options)
    for name in ["tenant-x", "a-tenant-12", "tenant-12/b"]:
        with pytest.raises(Refusal) as refusal:
            check_name(name, options)
        assert refusal.value.code is Code.SOURCE_NAME


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"allowed_roots": ["adapters"]}, "adapters"),
        ({"allowed_roots": "/adapters"}, "tuple"),
        ({"allowed_roots": ["/a\0b"]}, "full path"),
        ({"allowed_names": "("}, "no regular expression"),
        ({"allowed_repositories": {"org/name": "main"}}, "pattern"),
        ({"allowed_repositories": {"name": COMMIT}}, "pattern"),
        ({"allowed_repositories": ["org/name"]}, "dictionary"),
        ({"adapter_file_gib": 0}, "greater than 0"),
    ],
)
def test_options_that_are_refused(given: dict[str, Any], where: str):
    with pytest.raises(ValueError, match=where):
        Options(**given)


def test_a_folder_under_a_root(root, options):
    assert find_folder("tenant/one", options) == root / "tenant" / "one"
    assert locate(str(root / "tenant" / "one"), options, fresh=True) == root / "tenant" / "one"
    assert find_folder("tenant", options) is None, "it holds adapters and is none"
    assert find_folder("nowhere", options) is None


def test_a_compiled_folder_under_a_root(root, options):
    write(root / "compiled", files=FILES[2:])
    assert find_folder("compiled", options) == root / "compiled"


def test_the_second_root(root, tmp_path):
    options = Options(allowed_roots=(str(root), str(tmp_path / "adapters-of-others")))
    assert find_folder("two", options) == tmp_path / "adapters-of-others" / "two"


@pytest.mark.parametrize(
    "path", ["{0}/../secret", "{0}-of-others/two", "/etc", "/nowhere", "/", "{0}/../nowhere", "org/x", "."]
)
def test_a_path_outside_is_refused_whether_it_is_there_or_not(root, options, path: str):
    refusal = refusal_of(path.format(root), options)
    assert refusal.code is Code.SOURCE_NOT_ALLOWED
    assert str(root) not in str(refusal), "a client need not know where"


@pytest.mark.parametrize("text", ["a\0b", "\ud800", "a\udcffb"])
def test_a_path_with_what_is_no_text(root, options, text: str):
    for refusal in (refusal_of(f"{root}/{text}", options), refusal_of(text, Options())):
        assert refusal.code is Code.SOURCE_NAME
        assert str(refusal).isprintable()
        assert "lora_path" in str(refusal)


@pytest.mark.parametrize("target", ["secret", "nowhere"])
def test_a_link_to_a_folder_outside(root, options, tmp_path, target: str):
    (root / "link").symlink_to(tmp_path / target)
    for look in (lambda: locate(str(root / "link"), options, fresh=True), lambda: find_folder("link", options)):
        with pytest.raises(Refusal) as refusal:
            look()
        assert refusal.value.code is Code.SOURCE_NOT_ALLOWED


@pytest.mark.parametrize("file", FILES)
def test_a_link_to_a_file_outside(root, options, tmp_path, file: str):
    folder = write(root / "linked", files=tuple(f for f in FILES if f != file))
    (folder / file).symlink_to(tmp_path / "secret" / FILES[1])
    assert refusal_of(str(folder), options).code is Code.SOURCE_NOT_ALLOWED


def test_a_link_within_the_root_is_followed(root, options):
    (root / "alias").symlink_to(root / "tenant" / "one")
    assert find_folder("alias", options) == root / "alias"


def test_a_root_that_is_a_link_itself(root, tmp_path):
    (tmp_path / "mounted").symlink_to(root)
    options = Options(allowed_roots=(str(tmp_path / "mounted"),))
    assert find_folder("tenant/one", options) == tmp_path / "mounted" / "tenant" / "one"
    assert locate(str(root / "tenant" / "one"), options, fresh=True) == root / "tenant" / "one"


def test_links_in_a_circle(root, options):
    (root / "a").symlink_to(root / "b")
    (root / "b").symlink_to(root / "a")
    assert find_folder("a", options) is None


def test_no_root_at_all_allows_no_folder(root):
    assert refusal_of(str(root / "tenant" / "one"), Options(allowed_roots=())).code is Code.SOURCE_NOT_ALLOWED
    only_the_hub = Options(allowed_repositories={"org/name": COMMIT})
    assert refusal_of(str(root / "tenant" / "one"), only_the_hub).code is Code.SOURCE_NOT_ALLOWED


def test_without_options_any_folder_is_read_as_in_vllm(root, monkeypatch):
    assert locate(str(root.parent / "secret"), Options(), fresh=True) == root.parent / "secret"
    monkeypatch.chdir(root)
    assert locate("tenant/one", Options(), fresh=True) == root / "tenant" / "one"
    monkeypatch.setenv("HOME", str(root))
    assert locate("~/tenant/one", Options(), fresh=True) == root / "tenant" / "one"
    assert locate("/nowhere/at/all", Options(), fresh=True) == Path("/nowhere/at/all")


@pytest.mark.parametrize("restricted", [True, False])
def test_the_size_of_a_folder(root, restricted: bool):
    write(root / "large", size=2**20)
    roots = (str(root),) if restricted else None
    locate(str(root / "large"), Options(allowed_roots=roots, adapter_file_gib=2 / 1024), fresh=True)
    refusal = refusal_of(str(root / "large"), Options(allowed_roots=roots, adapter_file_gib=1.9 / 1024))
    assert refusal.code is Code.SOURCE_TOO_LARGE
    assert "adapter_file_gib" in str(refusal)


def test_the_name_of_a_repository():
    options = Options(allowed_repositories={"org/name": COMMIT})
    assert find_repository("org/name", options) == hub.Repository("org/name", COMMIT)
    assert find_repository("org/name/", options) == hub.Repository("org/name", COMMIT)
    assert find_repository("org/name/a/b", options) == hub.Repository("org/name", COMMIT, "a/b")
    assert [find_repository(name, options) for name in ["org", "org/names", "org/other", "a/org/name"]] == [None] * 4
    with pytest.raises(Refusal) as refusal:
        find_repository("org/name/../../x", options)
    assert refusal.value.code is Code.SOURCE_NAME


@pytest.mark.parametrize("restricted", [True, False])
def test_a_name_that_is_not_loaded_says_what_to_do(root, restricted: bool, monkeypatch):
    """The stack of the front end has the paths of those that are."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refusal = refusal_of("tenant/one", Options(allowed_roots=(str(root),) if restricted else None))
    assert refusal.code is (Code.SOURCE_NOT_ALLOWED if restricted else Code.FOLDER_MISSING)
    assert "full path" in str(refusal)
    assert "load that first" in str(refusal)
    assert "put its files" not in str(refusal)


def test_every_folder_of_a_stack_is_in_an_allowed_one(root):
    config = SimpleNamespace(additional_config={"scute": {"allowed_roots": [str(root)]}})
    inside, outside = root / "tenant" / "one", root.parent / "secret"
    for folders in ([inside, outside], [outside, inside]):
        with pytest.raises(Refusal) as refusal:
            check_folder(config, stack_path(folders))
        assert refusal.value.code is Code.SOURCE_NOT_ALLOWED

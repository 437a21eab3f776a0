"""The OpenAI server with allowed roots and repositories: a name in a request is enough, and not every name is."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from conftest import disagreement
from damage import write_damaged
from http_server import Server, serve

from scute.admission import compile_folder
from scute.admission.base_folder import read_base
from scute.engine.adapter_files import FILES
from scute.errors import Code
from scute.testing.adapters import AMPLIFIED
from scute.testing.tiny import tiny_prompts

pytestmark = pytest.mark.engine

BOUND = 1e-4
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def root(world, tmp_path_factory) -> Path:
    """Adapters of every method, one compiled, a damaged one and a large one; and one beside the root."""
    root = tmp_path_factory.mktemp("sources") / "adapters"
    for name, folder in world.folders.items():
        shutil.copytree(folder, root / "tenants" / name)
    compile_folder(Path(world.folders["dora"]), root / "compiled", read_base(world.base))
    write_damaged(Path(world.folders["dora"]), "nan", root / "damaged")
    shutil.copytree(world.folders["dora"], root / "large")
    os.truncate(root / "large" / FILES[1], 2**30)
    shutil.copytree(world.folders["dora"], root.parent / "outside")
    (root / "link").symlink_to(root.parent / "outside")
    return root


@pytest.fixture(scope="module")
def server(world, root, tmp_path_factory) -> Iterator[Server]:
    """The hub's client is the real one, without a network: its cache has one repository at one commit."""
    home = tmp_path_factory.mktemp("http-sources")
    repository = home / "hub" / "models--org--adapters"
    shutil.copytree(world.folders["ia3"], repository / "snapshots" / COMMIT)
    shutil.copytree(world.folders["oft"], repository / "snapshots" / COMMIT / "tenants" / "7")
    options = {
        "allowed_roots": [str(root)],
        "allowed_repositories": {"org/adapters": COMMIT, "org/empty": COMMIT},
        "adapter_file_gib": 0.5,
    }
    with serve(world.base, home, {"static": "org/adapters"}, options, HF_HOME=str(home)) as running:
        yield running


def check(world, server: Server, name: str, recipe: str) -> None:
    rows = [server.complete(name, prompt) for prompt in tiny_prompts(2)]
    assert disagreement(world, recipe, rows) <= BOUND, name


def ask(server: Server, name: str) -> requests.Response:
    return server.post("/v1/completions", model=name, prompt=[5, 6], max_tokens=1)


def test_a_hub_id_on_the_command_line(world, server):
    assert server.models() == ["base", "static"]
    check(world, server, "static", "ia3")


@pytest.mark.parametrize("recipe", AMPLIFIED)
def test_a_name_under_the_root(world, server, root, recipe: str):
    """The folder may go after the first request."""
    check(world, server, f"tenants/{recipe}", recipe)
    shutil.rmtree(root / "tenants" / recipe)
    check(world, server, f"tenants/{recipe}", recipe)
    assert f"tenants/{recipe}" in server.models()


@pytest.mark.parametrize(
    ("name", "recipe"), [("compiled", "dora"), ("org/adapters", "ia3"), ("org/adapters/tenants/7", "oft")]
)
def test_names_of_compiled_folders_and_of_repositories(world, server, name: str, recipe: str):
    check(world, server, name, recipe)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("../outside", Code.SOURCE_NAME),
        ("tenants/../../outside", Code.SOURCE_NAME),
        ("org/adapters/../../x", Code.SOURCE_NAME),
        ("/etc", Code.SOURCE_NAME),
        ("link", Code.SOURCE_NOT_ALLOWED),
        ("large", Code.SOURCE_TOO_LARGE),
        ("damaged", Code.TENSOR_NOT_FINITE),
        ("org/empty", Code.FOLDER_MISSING),
    ],
)
def test_names_that_are_refused(world, server, root, name: str, code: Code):
    for _ in range(2):
        answer = ask(server, name)
        message = answer.json()["error"]["message"]
        assert (answer.status_code, message.partition("] ")[0]) == (400, f"[scute:{code}")
        assert str(root) not in message
    check(world, server, "static", "ia3")


@pytest.mark.parametrize("name", ["nowhere", "tenants", "org", "org/other", "damaged/x"])
def test_unknown_names(server, name: str):
    answer = ask(server, name)
    assert answer.status_code == 404
    assert f"`{name}` does not exist" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["{0}/../outside", "{0}/link", "/nowhere", "org/other"])
def test_load_calls_obey_the_options(server, root, path: str):
    answer = server.load("mine", path.format(root))
    assert (answer.status_code, Code.SOURCE_NOT_ALLOWED in answer.text) == (400, True)


def test_load_calls_within_the_options(world, server, root):
    assert server.load("mine", root / "compiled").status_code == 200
    assert server.load("hers", "org/adapters/tenants/7").status_code == 200
    check(world, server, "mine", "dora")
    check(world, server, "hers", "oft")


def test_an_unloaded_name_is_looked_up_again(world, server, root):
    """With whatever is there by then."""
    assert server.unload("compiled").status_code == 200
    assert "compiled" not in server.models()
    shutil.rmtree(root / "compiled")
    shutil.copytree(world.folders["lora-r8"], root / "compiled")
    check(world, server, "compiled", "lora-r8")

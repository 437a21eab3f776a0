"""The imports point the way that docs/architecture.md says, and the page names what is there."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "scute"
PAGE = (ROOT / "docs" / "architecture.md").read_text()

MAY_IMPORT = {
    "errors": set(),
    "agreement": set(),
    "algebra": set(),
    "admission": {"algebra", "errors"},
    "kernels": set(),
    "engine": {"algebra", "admission", "kernels", "errors"},
    "costs": {"algebra", "admission", "kernels", "errors"},
    "tuning": {"admission", "costs", "kernels", "errors"},
    "conversion": {"agreement", "algebra", "admission", "errors"},
    "cli": {"algebra", "admission", "conversion", "costs", "engine", "tuning", "verify", "errors"},
    "testing": {"agreement", "algebra", "admission", "engine", "errors"},
    "verify": {"agreement", "algebra", "admission", "costs", "engine", "errors", "testing"},
    "demo": {"agreement", "algebra", "admission", "engine", "errors", "testing"},
}
HOMES = {"vllm": {"engine"}, "peft": {"testing", "demo", "verify"}, "triton": {"kernels"}, "typer": {"cli", "demo"}}
FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Dotted names of everything that a file imports anywhere, in functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def package_of(file: str) -> str:
    return file.partition("/")[0].removesuffix(".py")


@pytest.mark.parametrize("file", FILES)
def test_imports_point_one_way(file):
    package = package_of(file)
    for name in imports(SOURCE / file):
        top, _, rest = name.partition(".")
        other = rest.partition(".")[0]
        if top == "scute" and other and ((SOURCE / other).exists() or (SOURCE / f"{other}.py").exists()):
            assert other in MAY_IMPORT[package] | {package}, f"{file} imports {name}"
        assert package in HOMES.get(top, {package}), f"{file} imports {name}"


def test_the_imports_of_a_file_are_found():
    found = set(imports(SOURCE / "engine" / "layers.py"))
    assert {"scute.kernels.ops", "vllm.config.lora.LoRAConfig"} <= found


def section(heading: str) -> str:
    return PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def test_the_reading_order_is_short_and_exists():
    paths = re.findall(r"^\d+\. `([^`]+)`", section("Reading order"), re.MULTILINE)
    assert 5 <= len(paths) <= 10
    assert [path for path in paths if not (SOURCE / path).exists()] == []


def test_every_module_has_its_sentence():
    named = re.findall(r"^- `([^`]+\.py)`: \S", section("Modules"), re.MULTILINE)
    assert sorted(named) == [file for file in FILES if (SOURCE / file).name not in ("__init__.py", "__main__.py")]


def test_every_binding_is_in_the_table():
    tree = ast.parse((SOURCE / "engine" / "bind.py").read_text())
    bindings = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("bind_")]
    named = re.findall(r"^\| `(bind_\w+)` \|", section("Where vLLM is touched"), re.MULTILINE)
    assert list(dict.fromkeys(named)) == bindings


@pytest.mark.parametrize("page", sorted(p.relative_to(ROOT) for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]))
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?://)([^)#]+)", (ROOT / page).read_text())
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_no_two_test_files_have_one_name():
    """pytest cannot collect them together."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))

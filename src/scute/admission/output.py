"""A folder that is put in place whole or not at all, and that takes the place of nothing but its like."""

import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path


def check_output(out: Path, names: Collection[str], *, force: bool, kept: Collection[Path] = ()) -> None:
    """Whether a folder may be written to `out`. names: of the files that such a folder holds. kept: what is read.

    Raises FileExistsError if something is there, unless `force` is given and it holds files of these names only.
    """
    if not out.exists() and not out.is_symlink():
        return
    reason = _not_replaced(out, names, kept)
    if reason is not None:
        raise FileExistsError(f"{out} {reason}, so it is not replaced; give another name")
    if not force:
        raise FileExistsError(f"{out} is there already; give another name, or --force to replace it")


def _not_replaced(out: Path, names: Collection[str], kept: Collection[Path]) -> str | None:
    """Why not even --force replaces it, or None."""
    if out.is_symlink() or not out.is_dir():
        return "is there and no folder"
    place = out.resolve()
    read = next((path for path in kept if place in (path.resolve(), *path.resolve().parents)), None)
    if read is not None:
        return f"holds {read}, which is read"
    others = sorted(path.name for path in out.iterdir() if path.name not in names or not path.is_file())
    return f"also has {others[0]!r}" if others else None


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` to write to, which takes its place at the end; what was there is back if that fails."""
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{out.name[:200]}.", dir=out.parent))
    partial, old = beside / "new", beside / "old"
    try:
        partial.mkdir()
        yield partial
        for path in partial.iterdir():  # safetensors lets the owner alone read; a server may run as somebody else
            path.chmod(path.stat().st_mode | (partial.stat().st_mode & 0o044))
        if out.exists():
            out.rename(old)
        try:
            partial.rename(out)
        except OSError:
            if old.exists():
                old.rename(out)
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)

"""Mutations of the files and of the folder that holds them."""

import json
import os
import random
import shutil
import struct
from pathlib import Path

from fuzz_files import pick
from fuzz_folder import Folder

SPARSE = 2**42
"""Bytes that a sparse file says it has; it takes no room on the disk."""


def sparse(rng: random.Random, folder: Folder) -> bool:
    """Terabytes that are not there: by the length of the file, of its header, or of one tensor."""
    how, name = rng.randrange(3), pick(rng, folder)

    def write(place: Path) -> None:
        path = place / folder.tensor_file
        if not path.is_file():
            return
        if how == 0:
            os.truncate(path, SPARSE)
            return
        if how == 1:
            path.write_bytes(struct.pack("<Q", SPARSE - 64))
        else:
            entry = {"dtype": "F32", "shape": [SPARSE // 1024, 256], "data_offsets": [0, SPARSE]}
            header = json.dumps({name: entry}).encode()
            path.write_bytes(struct.pack("<Q", len(header)) + header)
        os.truncate(path, SPARSE)

    folder.on_files.append(write)
    return False


def files(rng: random.Random, folder: Folder) -> bool:
    """A file that is missing, or something else in its place."""
    name = rng.choice([folder.json_file, folder.tensor_file])
    how = rng.randrange(8)

    def change(place: Path) -> None:
        path = place / name
        path.unlink(missing_ok=True)
        if how == 0:
            path.mkdir()
        elif how == 1:
            path.symlink_to(path.name)
        elif how == 2:
            path.symlink_to("/nowhere/at/all")
        elif how == 3:
            os.mkfifo(path)
        elif how == 4:
            path.symlink_to("/dev/zero")
        elif how == 5:
            path.symlink_to("/")
        elif how == 6:
            path.touch()

    folder.on_files.append(change)
    return False


def whole_folder(rng: random.Random, folder: Folder) -> bool:
    """The folder is a file, empty, not there, a link in a circle, or has a pickle in place of the tensors."""
    how = rng.randrange(5)

    def change(place: Path) -> None:
        if how == 4:
            if (place / folder.tensor_file).is_file():
                (place / folder.tensor_file).rename(place / "adapter_model.bin")
            return
        shutil.rmtree(place)
        if how == 0:
            place.touch()
        elif how == 1:
            place.mkdir()
        elif how == 2:
            place.symlink_to(place.name)

    folder.on_files.append(change)
    return False


def moved_files(rng: random.Random, folder: Folder) -> bool:
    """Files that are links to what they were, and files that nobody reads beside them, say nothing."""
    how = rng.randrange(3)

    def change(place: Path) -> None:
        if how == 0:
            (place / "real").mkdir()
            for name in (folder.json_file, folder.tensor_file):
                if (place / name).is_file():
                    (place / name).rename(place / "real" / name)
                    (place / name).symlink_to(f"real/{name}")
        elif how == 1:
            (place / "README.md").write_text("x")
            (place / "checkpoint-1").mkdir()
            (place / "adapter_model.safetensors.tmp").write_text("x")
        else:
            (place / "adapter_model.bin").write_bytes(b"\x80\x04.")

    folder.on_files.append(change)
    return True


MUTATIONS = [sparse, files, whole_folder, moved_files]

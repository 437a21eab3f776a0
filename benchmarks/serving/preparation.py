"""The process that writes the base model and the tenants, and asks the PEFT library about them.

It runs beside engines that start. What it makes stays in the work folder for the next run on the machine.
"""

import hashlib
import inspect
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scute.testing import adapters, tiny
from serving import checks, models, reference, tenants
from serving.processes import parent


class Preparation:
    """root: the work folder. One folder in it for every model, dtype and version of what draws them."""

    def __init__(self, root: Path, model: str, layers: int | None, dtype: str) -> None:
        self.config = models.shape(model, layers)
        self.dtype = getattr(torch, dtype)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.folder = root / f"{model}-{self.config.num_hidden_layers}-{dtype}-{_digest()}"
        self.base = self.folder / "base"
        self._scores = self.folder / "reference.npz"

    def write_base(self) -> Path:
        if not (self.base / "config.json").exists():
            models.write_base(self.base, self.config, self.dtype, self.device)
        return self.base

    def write_tenants(self, names: Sequence[str]) -> dict[str, Path]:
        folders = {name: self.folder / "tenants" / name for name in names}
        absent = [name for name, folder in folders.items() if not (folder / "adapter_config.json").exists()]
        if absent:
            writer = tenants.Writer(self.base, self.device)
            for name in absent:
                writer.write(name, folders[name])
        return folders

    def scores(self, names: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """Of every tenant and of the base model: what PEFT says about `checks.rows`, [prompts, tokens - 1]."""
        known = dict(np.load(self._scores)) if self._scores.exists() else {}
        absent = [name for name in names if name not in known]
        if absent or not known:
            folders = self.write_tenants(absent)
            sequences = [[*prompt, *decoded] for prompt, decoded in checks.rows(self.config.vocab_size)]
            made = reference.Reference(self.base, self.device).logprobs(sequences, folders)
            known |= {name: values.numpy() for name, values in made.items()}
            np.savez(self._scores, **known)
        return {name: known[name] for name in [reference.BASE, *names]}


def _digest() -> str:
    sources = "".join(inspect.getsource(module) for module in (models, tenants, adapters, tiny))
    return hashlib.sha256((sources + repr(checks.rows(256))).encode()).hexdigest()[:12]


def main() -> None:
    pipe = parent()
    preparation: Any = None
    while True:
        try:
            what, *values = pipe.recv()
        except EOFError:
            return
        try:
            if what == "start":
                preparation = Preparation(*values)
                answer = ("ok", (preparation.write_base(), preparation.config.vocab_size))
            else:
                answer = ("ok", getattr(preparation, what)(*values))
        except Exception as error:
            traceback.print_exc()
            answer = ("error", f"{type(error).__name__}: {error}")
        pipe.send(answer)


if __name__ == "__main__":
    main()

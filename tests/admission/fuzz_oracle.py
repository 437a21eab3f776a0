"""What an accepted folder has to compute, from readers that are not Scute's.

A PEFT folder: the PEFT library, which loads the very same files. A compiled folder: the formula, written down once more
over the manifest and safetensors' own reader.
"""

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from fuzz_configs import INERT
from peft import PeftModel
from peft_oracle import WIDTH, outputs_of
from safetensors.torch import load_file
from torch import Tensor, nn

PATTERNS = ("rank_pattern", "alpha_pattern")
HARMLESS_INITS = ("true", "false", "gaussian", "eva", "orthogonal", "mica")
INPUT = torch.randn(1, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def peft_outputs(folder: Path, base: nn.Module) -> dict[str, Tensor]:
    """Outputs of all projections and of the whole model. Raises whatever PEFT does."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(copy.deepcopy(base), str(folder), autocast_adapter_dtype=False)
    return outputs_of(model.eval(), INPUT)


def put_back_what_says_nothing(folder: Path, good: dict[str, Any]) -> None:
    """Make PEFT load what it stumbles over, where that cannot change what the adapter computes.

    Put back are fields that say how it was trained; fields that are off now and were off, whatever "off" is written as;
    initialisations that leave the base weight alone; and feedforward_modules that are not there, as the shape of
    (IA)3's vector tells its side, and PEFT checks that. Everything else stays.
    """
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for name in {*config, *good}:
        is_off = (
            not config.get(name)
            and not good.get(name)
            and (name not in config or config[name] != {} or name in PATTERNS)
        )
        is_harmless = name == "init_lora_weights" and str(config.get(name)).lower() in HARMLESS_INITS
        is_absent = name == "feedforward_modules" and config.get(name) is None
        if name in INERT or is_off or is_harmless or is_absent:
            config.pop(name, None)
            config.update({name: good[name]} if name in good else {})
    path.write_text(json.dumps(config))


def compiled_outputs(folder: Path, base: nn.Module) -> dict[str, Tensor]:
    """The same of a compiled folder."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    tensors = {name: tensor.double() for name, tensor in load_file(folder / "members.safetensors").items()}
    model = copy.deepcopy(base)
    for name, entry in manifest["members"].items():
        linear = model.get_submodule(name)
        linear.forward = _Formula(name, entry, tensors, _pair(manifest, tensors), linear.weight.T, linear.bias)
    return outputs_of(model, INPUT)


def _pair(manifest: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    pair = manifest["pair"]
    if pair is None:
        return None
    if pair["drawn_from"] is None:
        return tensors["pair.A"], tensors["pair.B"]
    generator = torch.Generator().manual_seed(pair["drawn_from"])
    drawn = []
    for shape in ((pair["rank"], pair["inputs"]), (pair["outputs"], pair["rank"])):
        matrix = torch.empty(shape, dtype=torch.float32)
        torch.nn.init.kaiming_uniform_(matrix, a=0, generator=generator)
        drawn.append(matrix.double())
    return drawn[0], drawn[1]


class _Formula:
    """((x R) W) s + b + sum of c (((x A) d) B) e, on one projection."""

    def __init__(
        self,
        name: str,
        entry: dict[str, Any],
        tensors: dict[str, Tensor],
        pair: tuple[Tensor, Tensor] | None,
        weight: Tensor,
        bias: Tensor | None,
    ) -> None:
        self.name, self.entry, self.tensors, self.pair, self.weight, self.bias = (
            name,
            entry,
            tensors,
            pair,
            weight,
            bias,
        )

    def __call__(self, x: Tensor) -> Tensor:
        own, rotated = self._own, x
        blocks = own("R")
        if blocks is not None:
            rotated = x @ torch.block_diag(*blocks)
        factors = [self._factors(index, term) for index, term in enumerate(self.entry["terms"])]
        scale, magnitude = own("s"), own("magnitude")
        if magnitude is not None:
            changed = self.weight + sum(c * a @ torch.diag(d) @ b for a, b, c, d, _ in factors)
            scale = magnitude / changed.norm(dim=0)
        y = rotated @ self.weight
        if scale is not None:
            y = y * scale
        for a, b, c, d, e in factors:
            y = y + c * ((x @ a) * d @ b) * (scale if magnitude is not None else e)
        return y + self._bias(scale)

    def _bias(self, scale: Tensor | None) -> Tensor | float:
        bias = self.bias if self._own("b.replaced") is None else self._own("b.replaced")
        if bias is not None and self.entry["scales_bias"] and scale is not None:
            bias = bias * scale
        if bias is not None and self._own("b.factor") is not None:
            bias = bias * self._own("b.factor")
        shift = self._own("b.shift")
        return sum(part for part in (bias, shift) if part is not None)

    def _own(self, slot: str) -> Tensor | None:
        return self.tensors[f"{self.name}.{slot}"] if slot in self.entry["slots"] else None

    def _factors(self, index: int, term: dict[str, Any]) -> tuple[Tensor, Tensor, float, Tensor, Tensor]:
        inputs, outputs = self.weight.shape
        if term["shared"]:
            assert self.pair is not None
            a, b = self.pair[0].T[:inputs], self.pair[1].T[:, :outputs]
        else:
            a, b = self.tensors[f"{self.name}.{index}.A"].T, self.tensors[f"{self.name}.{index}.B"].T
        d, e = (
            self.tensors[f"{self.name}.{index}.{vector}"] if vector in term["vectors"] else torch.ones(size).double()
            for vector, size in (("d", a.shape[1]), ("e", outputs))
        )
        return a, b, term["c"], d, e

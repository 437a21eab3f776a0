"""Folders that are wrong in one place or two: each is refused with a code, or computes what another reader says.

    python tests/admission/fuzz.py --count 20000 --out benchmarks/results/fuzz.json

Mutates good PEFT folders of every method and compiled folders. A finding is an exception that is no refusal, a folder
that takes longer than SECONDS, or a silent acceptance: an accepted folder whose outputs,
of the whole model and of every
projection, are not those of the oracle. The oracle is the PEFT library on the same files; where PEFT cannot load them,
an accepted folder must be one whose mutations all say of themselves that they change nothing, and it must compute what
the good folder did. Every fifth folder is also inspected: `scute inspect` must find what the compiler found, except in
values, which it does not read.
"""

import argparse
import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fuzz_configs
import fuzz_files
import fuzz_places
import torch
from fuzz_folder import NOTHING_TO_CHANGE, Folder, read
from fuzz_oracle import INPUT, compiled_outputs, peft_outputs, put_back_what_says_nothing
from peft import IA3Config, LoraConfig, OFTConfig, VeraConfig
from peft_oracle import outputs_of, save, served, toy

from scute.admission import BaseModel, compile_adapter, compile_folder
from scute.admission.compile import find_form
from scute.admission.reasons import Reasons
from scute.errors import Code, Refusal

SECONDS = 5.0
TOLERANCE = {True: 1e-9, False: 1e-5}
"""Largest difference of an output, as a share of its norm: where all tensors are float64, and where one is not.

Both sides compute in float64, but what Scute works out of a narrower tensor, as R, it keeps in float32.
"""
IN_VALUES = {Code.TENSOR_NOT_FINITE, Code.COMPILED_HASH}
"""What a look at headers alone does not find."""
CONFIGS: dict[str, Callable[[], Any]] = {
    "lora": lambda: LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_alpha=6),
    "lora-bias": lambda: LoraConfig(target_modules=["q_proj", "o_proj"], r=3, lora_bias=True, bias="lora_only"),
    "lora-all-biases": lambda: LoraConfig(target_modules=["q_proj"], r=2, bias="all"),
    "rslora": lambda: LoraConfig(
        target_modules=["q_proj", "down_proj"], r=4, use_rslora=True, rank_pattern={"q_proj": 5},
        alpha_pattern={"0.*q_proj": 3}
    ),
    "dora": lambda: LoraConfig(target_modules=["q_proj", "v_proj"], r=4, use_dora=True),
    "ia3": lambda: IA3Config(target_modules=["q_proj", "o_proj", "down_proj"], feedforward_modules=["down_proj",
    "o_proj"]),
    "vera": lambda: VeraConfig(target_modules=["q_proj", "v_proj"], r=4),
    "vera-drawn": lambda: VeraConfig(target_modules=["q_proj", "o_proj"], r=4, save_projection=False),
    "oft": lambda: OFTConfig(target_modules=["q_proj", "v_proj"], oft_block_size=4),
    "oft-cayley": lambda: OFTConfig(
        target_modules=["q_proj", "v_proj"], oft_block_size=3, use_cayley_neumann=False, block_share=True, coft=True,
        eps=2.0
    ),
}  # fmt: skip
MUTATIONS = {f.__name__: f for f in (*fuzz_configs.MUTATIONS, *fuzz_files.MUTATIONS, *fuzz_places.MUTATIONS)}


class TooSlow(BaseException):
    """Not an Exception, so that nothing on the way catches it."""


@dataclass
class Tally:
    """outcomes: by mutation, folders by "refused" or "accepted"; codes: refusals by code; findings: what is wrong."""

    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in MUTATIONS})
    kinds: dict[str, Counter[str]] = field(default_factory=dict)
    codes: Counter[str] = field(default_factory=Counter)
    oracles: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    folders: int = 0
    inspected: int = 0


class Fuzzer:
    """Good folders of every kind, the base model that they adapt, and a place for bad ones."""

    def __init__(self, work: Path) -> None:
        self.model, self.place = toy(), work / "mutated"
        self.model.prepare_inputs_for_generation = lambda *_: None  # PEFT asks for it if task_type is CAUSAL_LM
        self.base = BaseModel.from_module(self.model, torch.float64, gated=True)
        self.good: dict[str, Folder] = {}
        self.expected: dict[str, dict[str, torch.Tensor]] = {}
        for kind, config in CONFIGS.items():
            save(work / kind, toy(), config())
            compile_folder(work / kind, work / f"{kind}-compiled", self.base)
            for name in (kind, f"{kind}-compiled"):
                self.good[name] = read(work / name, name)
                oracle = compiled_outputs if self.good[name].is_compiled else peft_outputs
                self.expected[name] = oracle(work / name, self.model)

    def run(self, count: int, seed: int, show: Callable[[str], None] = lambda _: None) -> Tally:
        """Try `count` folders; folder i of a seed is the same in every run."""
        tally = Tally()
        for number in range(count):
            self.try_one(number, seed, tally)
            if (number + 1) % 1000 == 0:
                show(f"{number + 1} folders, {len(tally.findings)} findings")
        return tally

    def try_one(self, number: int, seed: int, tally: Tally) -> None:
        rng = random.Random(f"{seed}/{number}")
        kind = rng.choice(list(self.good))
        folder, names, harmless = self.good[kind].copy(), [], True
        for _ in range(rng.choice([1, 1, 1, 2])):
            names.append(rng.choice(list(MUTATIONS)))
            with contextlib.suppress(*NOTHING_TO_CHANGE):
                harmless &= MUTATIONS[names[-1]](rng, folder)
                continue
            harmless = False
        folder.rehash = folder.is_compiled and rng.random() < 0.7
        folder.write(self.place)
        what = f"{kind} {'+'.join(names)} (seed {seed}, number {number})"
        outcome, form = self._compiled(what, tally)
        tally.folders += 1
        for name in names:
            tally.outcomes[name][outcome] += 1
        tally.kinds.setdefault(kind, Counter())[outcome] += 1
        if form is not None:
            self._check(what, form, kind, folder, harmless, tally)
        if number % 5 == 0:
            self._inspect(what, outcome, tally)

    def _compiled(self, what: str, tally: Tally) -> tuple[str, Any]:
        try:
            with at_most(SECONDS):
                form = compile_adapter(self.place, self.base)
        except Refusal as refusal:
            tally.codes[str(refusal.code)] += 1
            if not str(refusal).isprintable() or len(str(refusal)) > 1400:
                tally.findings.append(f"{what}: the refusal is no printable line")
            return f"refused {refusal.code}", None
        except TooSlow:
            tally.findings.append(f"{what}: takes more than {SECONDS:.0f} s")
            return "too slow", None
        except Exception as error:
            tally.findings.append(f"{what}: {type(error).__name__}: {error}"[:300])
            return "crashed", None
        return "accepted", form

    def _expected(self, kind: str, folder: Folder) -> tuple[dict[str, torch.Tensor], str]:
        """What the folder computes, and who says so."""
        if folder.is_compiled:
            return compiled_outputs(self.place, self.model), "the formula"
        with contextlib.suppress(Exception):
            return peft_outputs(self.place, self.model), "PEFT"
        put_back_what_says_nothing(self.place, self.good[kind].config)
        return peft_outputs(self.place, self.model), "PEFT, once what says nothing was put back"

    def _check(self, what: str, form: Any, kind: str, folder: Folder, harmless: bool, tally: Tally) -> None:
        try:
            expected, oracle = self._expected(kind, folder)
        except Exception as error:
            if not harmless:
                tally.findings.append(f"{what}: accepted, and the oracle cannot load it: {error!r}"[:300])
                return
            expected, oracle = self.expected[kind], "the good folder"
        if not fits_float32(form):
            tally.oracles["nobody: beyond float32, which an engine refuses when it packs the adapter"] += 1
            return
        tally.oracles[oracle] += 1
        found = outputs_of(served(self.model, form), INPUT)
        tolerance = TOLERANCE[all(tensor.dtype == "F64" for tensor in folder.tensors.values())]
        for reference in [expected, self.expected[kind]] if harmless else [expected]:
            wrong = [name for name in self._comparable(form) if not is_equal(found[name], reference[name], tolerance)]
            if wrong:
                tally.findings.append(f"{what}: accepted, and computes something else at {', '.join(wrong[:3])}")
                return

    def _comparable(self, form: Any) -> set[str]:
        """All outputs, but for those of an up projection that (IA)3 moves its scale to; what follows it shows that."""
        moved = set(self.base.gated_up.values()) if form.method == "(IA)3" else set()
        return {name for name in self.expected["lora"] if name not in moved}

    def _inspect(self, what: str, outcome: str, tally: Tally) -> None:
        """Every reason at once, from headers alone."""
        reasons = Reasons(collect=True)
        tally.inspected += 1
        try:
            with at_most(SECONDS):
                find_form(self.place, self.base, reasons, values=False)
        except (Exception, TooSlow) as error:
            tally.findings.append(f"{what}: the inspection raises {error!r}"[:300])
            return
        first = f"refused {reasons.found[0].code}" if reasons.found else "accepted"
        if first != outcome and not (first == "accepted" and outcome in {f"refused {code}" for code in IN_VALUES}):
            tally.findings.append(f"{what}: the compiler says {outcome!r}, the inspection {first!r}")


def fits_float32(form: Any) -> bool:
    """Whether all values do, as `scute.engine.admit` asks once more of its own dtype."""
    found: list[torch.Tensor | None] = []
    for member in form.members.values():
        found += [member.scale, member.magnitude, member.bias.replaced, member.bias.shift, member.bias.factor]
        found += [None if member.rotation is None else member.rotation.blocks]
        found += [tensor for term in member.terms for tensor in (term.a, term.b, term.d, term.e, term.c * term.a)]
    return all(bool(tensor.float().isfinite().all()) for tensor in found if tensor is not None)


def is_equal(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    if found.shape != expected.shape or not torch.equal(found.isfinite(), expected.isfinite()):
        return False
    if not expected.isfinite().all():
        return True
    return float((found - expected).norm()) <= tolerance * float(expected.norm())


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    def end(*_: Any) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, help="try this folder alone, and leave it there")
    parser.add_argument("--memory-gib", type=float, default=8.0, help="a folder that takes more than this crashes")
    parser.add_argument("--out", type=Path, default=Path("fuzz.json"))
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (int(arguments.memory_gib * 2**30),) * 2)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if arguments.number is not None:
        fuzzer, tally = Fuzzer(Path(tempfile.mkdtemp(prefix="scute-fuzz-"))), Tally()
        fuzzer.try_one(arguments.number, arguments.seed, tally)
        print(fuzzer.place, tally.codes, *tally.findings, sep="\n")
        return int(bool(tally.findings))
    with tempfile.TemporaryDirectory(prefix="scute-fuzz-") as work:
        fuzzer = Fuzzer(Path(work))
        start = time.perf_counter()
        tally = fuzzer.run(arguments.count, arguments.seed, lambda line: print(line, flush=True))
    report = report_of(tally, arguments.seed, time.perf_counter() - start)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return int(bool(tally.findings))


def report_of(tally: Tally, seed: int, seconds: float) -> dict[str, Any]:
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    crashed = sum(
        n for outcomes in tally.kinds.values() for name, n in outcomes.items() if name in ("crashed", "too slow")
    )
    return {
        "commit": os.environ.get("SCUTE_COMMIT") or head or "unknown",
        "machine": f"{os.cpu_count()}-core CPU",
        "seed": seed,
        "seconds": round(seconds, 1),
        "folders": tally.folders,
        "accepted": sum(outcomes["accepted"] for outcomes in tally.kinds.values()),
        "crashes": crashed,
        "silent_acceptances": sum("accepted, and" in finding for finding in tally.findings),
        "inspected": tally.inspected,
        "findings": tally.findings[:100],
        "accepted_checked_against": dict(tally.oracles),
        "refused_by_code": dict(sorted(tally.codes.items())),
        "by_mutation": {name: dict(sorted(outcomes.items())) for name, outcomes in tally.outcomes.items()},
        "by_kind": {name: dict(sorted(outcomes.items())) for name, outcomes in sorted(tally.kinds.items())},
    }


if __name__ == "__main__":
    sys.exit(main())

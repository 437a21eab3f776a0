"""Distillation: LoRA factors trained so that the model's next-token distributions follow the exact adapter's.

The loss is KL(exact ‖ LoRA), the mean over the tokens of the text (paper, section 6.2). Training is deterministic for
a seed, and goes on from its last state if it was stopped: the state holds factors, Adam's moments and the step.
"""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import kl_div

from scute.admission.tensors import DAMAGED
from scute.algebra.adapted import adapted
from scute.algebra.form import Member, Term
from scute.conversion.model import device_of, logits

STATE_FILE = "state.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Of Adam, as torch names them."""


@dataclass(frozen=True, slots=True)
class Training:
    """How the factors are trained.

    steps: of Adam, each on `batch` sequences. learning_rate: of the first step; it falls linearly, to 0 behind the
    last. seed: of the order of the text. keep_every: steps between two states on disk.
    """

    steps: int = 200
    batch: int = 4
    learning_rate: float = 1e-3
    seed: int = 0
    keep_every: int = 20


def remove_state(folder: Path) -> None:
    """Remove what a run has kept in its state folder, and the folder if nothing else is in it."""
    for name in (STATE_FILE, f"{STATE_FILE}.partial"):
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


class Distillation:
    """One training run. state: folder for its state; run: what identifies it, so that no other run is continued."""

    def __init__(self, training: Training, state: Path, run: str) -> None:
        self._training, self._state, self._run = training, state, run

    def train(
        self,
        model: nn.Module,
        exact: Mapping[str, Member],
        fixed: Mapping[str, Member],
        start: Mapping[str, Term],
        prompts: Sequence[Sequence[int]],
        progress: Callable[[str, int, int], None],
    ) -> dict[str, Term]:
        """The trained terms, float32, on the CPU; `start` and the model are left as they are.

        exact: the adapter to follow; fixed: members that stay as they are beside the trained ones.
        Raises ValueError if the state folder holds the state of another run or a damaged one, and if the run diverges.
        """
        device, steps = device_of(model), self._training.steps
        factors = {
            f"{module}.{side}": factor.detach().clone().to(device).requires_grad_()
            for module, term in start.items()
            for side, factor in (("a", term.a), ("b", term.b))
        }
        terms = {module: Term(factors[f"{module}.a"], factors[f"{module}.b"]) for module in start}
        members = {**fixed, **{module: Member(terms=(term,)) for module, term in terms.items()}}
        optimizer = torch.optim.Adam(factors.values(), lr=self._training.learning_rate)
        for step in range(self._restore(factors, optimizer), steps):
            optimizer.param_groups[0]["lr"] = self._training.learning_rate * (1 - step / steps)
            optimizer.zero_grad()
            loss = sum(_backward(model, exact, members, prompts[i]) for i in self._batch(step, len(prompts)))
            for factor in factors.values():
                if factor.grad is not None:
                    factor.grad /= self._training.batch
            optimizer.step()
            if not all(bool(factor.isfinite().all()) for factor in factors.values()):
                self._refuse(step)
            progress(f"distillation, KL {loss / self._training.batch:.2e}", step + 1, steps)
            if (step + 1) % self._training.keep_every == 0:
                self._keep(step + 1, factors, optimizer)
        return {m: Term(t.a.detach().cpu(), t.b.detach().cpu()) for m, t in terms.items()}

    def _refuse(self, step: int) -> NoReturn:
        rate, state = self._training.learning_rate, f"remove {self._state} and " if self._state.exists() else ""
        raise ValueError(f"the distillation diverged in step {step + 1}; {state}try less than --learning-rate {rate:g}")

    def _batch(self, step: int, count: int) -> list[int]:
        """Indices of the step's sequences: the text over and over, in a new order each time."""
        first, indices = step * self._training.batch, []
        for position in range(first, first + self._training.batch):
            generator = torch.Generator().manual_seed(self._training.seed + position // count)
            indices.append(int(torch.randperm(count, generator=generator)[position % count]))
        return indices

    def _keep(self, step: int, factors: Mapping[str, Tensor], optimizer: torch.optim.Adam) -> None:
        self._state.mkdir(parents=True, exist_ok=True)
        tensors = {name: factor.detach().cpu().contiguous() for name, factor in factors.items()}
        for name, factor in factors.items():
            for moment in MOMENTS:
                tensors[f"{name}.{moment}"] = optimizer.state[factor][moment].cpu().contiguous()
        partial = self._state / f"{STATE_FILE}.partial"
        save_file(tensors, partial, metadata={"step": str(step), "run": self._run})
        os.replace(partial, self._state / STATE_FILE)

    def _restore(self, factors: Mapping[str, Tensor], optimizer: torch.optim.Adam) -> int:
        """Load the last state, if there is one; returns the step to go on from."""
        path = self._state / STATE_FILE
        if not path.exists():
            return 0
        parts = ("", *(f".{moment}" for moment in MOMENTS))
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                told = file.metadata() or {}
                kept = {}
                if told.get("run") == self._run:
                    kept = {
                        n: [file.get_tensor(n + part).to(factor) for part in parts] for n, factor in factors.items()
                    }
                step = int(told.get("step", ""))
        except (SafetensorError, *DAMAGED) as error:
            raise ValueError(self._damaged(error)) from error
        if not kept:
            raise ValueError(f"{self._state} has the state of another distillation; remove it to start anew")
        for name, factor in factors.items():
            if not all(tensor.shape == factor.shape and bool(tensor.isfinite().all()) for tensor in kept[name]):
                raise ValueError(self._damaged(f"{name} has another shape, or is not finite"))
            value, *moments = kept[name]
            with torch.no_grad():
                factor.copy_(value)
            optimizer.state[factor] = {"step": torch.tensor(float(step)), **dict(zip(MOMENTS, moments, strict=True))}
        return step

    def _damaged(self, what: object) -> str:
        return f"the state in {self._state} is damaged ({what}); remove that folder to start anew"


def _backward(
    model: nn.Module, exact: Mapping[str, Member], members: Mapping[str, Member], prompt: Sequence[int]
) -> float:
    """Adds the gradients of the mean KL over one sequence; returns it, in nats a token."""
    tokens = torch.tensor(prompt, device=device_of(model))
    with torch.no_grad(), adapted(model, exact):
        target = logits(model, tokens).log_softmax(dim=-1)
    with adapted(model, members):
        found = logits(model, tokens).log_softmax(dim=-1)
    loss = kl_div(found, target, log_target=True, reduction="batchmean")
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())

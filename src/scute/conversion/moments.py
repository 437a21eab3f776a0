"""Second moments of what goes into each projection, on given text."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from scute.algebra.adapted import adapted
from scute.algebra.form import Member
from scute.conversion.model import device_of, logits

GROUP_BYTES = 4 << 30
"""Moments that are gathered in one pass over the text; a large model takes several passes."""


def second_moments(
    model: nn.Module, members: Mapping[str, Member], prompts: Sequence[Sequence[int]], widths: Mapping[str, int]
) -> Iterator[tuple[str, Tensor]]:
    """For every module of `widths` (its in_features), in order, E[xᵀ x] over all tokens: [in, in], float64.

    The model runs with the adapter applied: what the converted adapter has to reproduce is the adapter's own run, in
    which earlier layers have already moved the inputs of the later ones.
    """
    for group in _groups(widths):
        sums = {name: torch.zeros(widths[name], widths[name], dtype=torch.float64) for name in group}
        sums = {name: total.to(device_of(model)) for name, total in sums.items()}
        hooks = [model.get_submodule(n).register_forward_pre_hook(partial(_add, total)) for n, total in sums.items()]
        try:
            with torch.no_grad(), adapted(model, members):
                for prompt in prompts:
                    logits(model, torch.tensor(prompt, device=device_of(model)))
        finally:
            for hook in hooks:
                hook.remove()
        count = sum(len(prompt) for prompt in prompts)
        for name in group:
            yield name, sums.pop(name) / count


def _add(total: Tensor, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    x = inputs[0].flatten(0, -2).double()
    total += x.T @ x


def _groups(widths: Mapping[str, int]) -> Iterator[list[str]]:
    group: list[str] = []
    num_bytes = 0
    for name, width in widths.items():
        if group and num_bytes + 8 * width * width > GROUP_BYTES:
            yield group
            group, num_bytes = [], 0
        group.append(name)
        num_bytes += 8 * width * width
    if group:
        yield group

"""The steps of one conversion, over what they share: the adapter, the base weights, the model and the text."""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scute.admission.base import BaseModel
from scute.admission.base_folder import BaseWeights
from scute.agreement import Agreement, agreement, random_prompts
from scute.algebra.form import AdapterForm, Member, Term
from scute.algebra.update import update
from scute.conversion.distillation import Distillation
from scute.conversion.factors import (
    activation_aware_factors,
    exact_factors,
    squared_norm,
    squared_rest,
    svd_factors,
)
from scute.conversion.model import load_model, logprobs, vocabulary_of
from scute.conversion.moments import second_moments
from scute.conversion.prompts import read_prompts
from scute.conversion.report import Layer
from scute.conversion.settings import Method, Settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[str, int, int], None]


class Run:
    """The adapter `form` on a base model; the model and the text are loaded when a step first needs them.

    folder: of the base model, whose weights inexact projections need. exact: the terms of the projections that
    have an exact LoRA of the rank; inexact: the other projections.
    """

    def __init__(
        self, form: AdapterForm, base: BaseModel, folder: Path, settings: Settings, progress: Progress
    ) -> None:
        self._form, self._base, self._folder = form, base, folder
        self._settings, self._progress = settings, progress
        self._loaded: PreTrainedModel | None = None
        self._prompts: list[list[int]] | None = None
        exact = {module: exact_factors(member, settings.rank) for module, member in form.members.items()}
        self.exact = {module: term for module, term in exact.items() if term is not None}
        self.inexact = [module for module in form.members if module not in self.exact]

    @cached_property
    def _weights(self) -> BaseWeights:
        return BaseWeights(self._folder, self._settings.device)

    @property
    def model(self) -> "PreTrainedModel":
        if self._loaded is None:
            self._loaded = load_model(self._folder, torch.device(self._settings.device))
        return self._loaded

    @property
    def prompts(self) -> list[list[int]]:
        if self._prompts is None:
            vocabulary, data = vocabulary_of(self._folder), self._settings.data
            self._prompts = (
                random_prompts(vocabulary)
                if data is None
                else read_prompts(data, self._folder, self._settings.limit, vocabulary)
            )
        return self._prompts

    def factors(self) -> dict[str, Term]:
        """The exact terms where there are some, else those of the SVD, on the CPU, in the order of the base model."""
        found = dict(self.exact)
        for done, (module, moment) in enumerate(self._moments(), start=1):
            self._progress(f"SVD of {module}", done - 1, len(self.inexact))
            change, rank = self._update(module), self._settings.rank
            term = svd_factors(change, rank) if moment is None else activation_aware_factors(change, moment, rank)
            found[module] = Term(term.a.cpu(), term.b.cpu())
        return {module: found[module] for module in self._form.members}

    def distilled(self, terms: Mapping[str, Term], distillation: Distillation) -> dict[str, Term]:
        """The inexact terms after training. Exact ones have nothing to learn, but are there while it runs."""
        start = {module: terms[module] for module in self.inexact}
        if not start:
            return {}
        fixed = as_members(self.exact)
        return distillation.train(self.model, self._form.members, fixed, start, self.prompts, self._progress)

    def layers(self, terms: Mapping[str, Term]) -> Iterator[Layer]:
        """What the terms are, and what they leave out of the updates; inexact ones are computed once more."""
        for done, (module, term) in enumerate(terms.items()):
            self._progress(f"what is left out of {module}", done, len(terms))
            change = self._update(module)
            route = "exact" if module in self.exact else str(self._settings.method)
            yield Layer(module, route, term.rank, squared_norm(change), squared_rest(change, term))

    def agreement(self, terms: Mapping[str, Term]) -> Agreement:
        """The converted adapter against the exact one, and that against the base model."""
        runs = []
        for done, members in enumerate(({}, self._form.members, as_members(terms))):
            self._progress("error and effect", done, 3)
            runs.append(logprobs(self.model, self.prompts, members))
        return agreement(*runs)

    def _moments(self) -> Iterator[tuple[str, Tensor | None]]:
        """The inexact modules, each with the second moment of its inputs if the method asks for it."""
        if self._settings.method is not Method.ASVD or not self.inexact:
            return ((module, None) for module in self.inexact)
        widths = {module: self._base.projections[module].in_features for module in self.inexact}
        return second_moments(self.model, self._form.members, self.prompts, widths)

    def _update(self, module: str) -> Tensor:
        """ΔW, [in, out], float32. What is exact has terms only, and they do not depend on W."""
        projection = self._base.projections[module]
        if module in self.exact:
            weight = torch.zeros(projection.in_features, projection.out_features, device=self._settings.device)
        else:
            weight = self._weights.read(module, projection)
        return update(self._form.members[module], weight)


def as_members(terms: Mapping[str, Term]) -> dict[str, Member]:
    return {module: Member(terms=(term,)) for module, term in terms.items()}

"""The ops on single rows in float64, from the tensors that were drawn and not from table or plan."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scute.tuning.layers import Layer, Pieces, Pool

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest error of a row of a slice, as a share of its norm: a few roundings to the dtype."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """worst: the largest error of any sampled row and slice; finite: no element of the whole output is NaN."""

    worst: float
    bound: float
    rows: int
    finite: bool

    @property
    def passed(self) -> bool:
        return self.finite and self.worst <= self.bound  # a NaN never passes

    def join(self, other: "Verdict") -> "Verdict":
        both = (self.worst, other.worst)
        worst = math.nan if any(map(math.isnan, both)) else max(both)
        return Verdict(worst, self.bound, self.rows + other.rows, self.finite and other.finite)


def rotated_rows(layer: Layer, slots: Sequence[int], x: Tensor) -> Tensor:
    """[slices, rows, in]: x R of every row for every slice; x [rows, in] float64, row i of slot slots[i]."""
    out = x.repeat(len(layer.shape.slices), 1, 1)
    for (slot, i), pieces in layer.pieces.items():
        rows = [row for row, s in enumerate(slots) if s == slot]
        if pieces.rotation is not None and rows:
            blocks = x[rows].view(len(rows), len(pieces.rotation), -1)
            out[i, rows] += torch.einsum("rni,nij->rnj", blocks, pieces.rotation.double()).reshape(len(rows), -1)
    return out


def projected_rows(layer: Layer, slots: Sequence[int], x: Tensor, weight: Tensor) -> Tensor:
    """[rows, out]: the base projection of rotated rows."""
    parts = torch.split(weight, list(layer.shape.slices))
    inputs = rotated_rows(layer, slots, x)
    return torch.cat([rows @ part.double().t() for rows, part in zip(inputs, parts, strict=True)], dim=1)


def adapted_rows(layer: Layer, pool: Pool, slots: Sequence[int], x: Tensor, y: Tensor) -> Tensor:
    """[rows, out]: what `adapt` makes of the rows y."""
    out, starts = y.clone(), layer.shape.starts
    for (slot, i), pieces in layer.pieces.items():
        rows = [row for row, s in enumerate(slots) if s == slot]
        if rows:
            columns = slice(starts[i], starts[i + 1])
            out[rows, columns] = _adapted(pieces, pool, x[rows], y[rows, columns])
    return out


def _adapted(pieces: Pieces, pool: Pool, x: Tensor, y: Tensor) -> Tensor:
    if pieces.scale is not None:
        y = y * pieces.scale.double()
    if pieces.shift is not None:
        y = y + pieces.shift.double()
    if pieces.a is not None and pieces.b is not None:
        y = y + x @ pieces.a.double().t() @ pieces.b.double()
    if pieces.d is not None and pieces.e is not None:
        a, b = pool.shared_a[0, :, : x.shape[1]], pool.shared_b[0, :, : y.shape[1]]
        y = y + (((x @ a.double().t()) * pieces.d.double()) @ b.double()) * pieces.e.double()
    return y


def compare(layer: Layer, rows: Sequence[int], actual: Tensor, exact: Tensor) -> Verdict:
    """actual [T, out] against exact [rows, out], slice by slice and row by row."""
    return compare_slices(layer.shape.slices, rows, actual, exact)


def compare_slices(slices: Sequence[int], rows: Sequence[int], actual: Tensor, exact: Tensor) -> Verdict:
    error = torch.split(actual[rows].double() - exact, list(slices), dim=1)
    truth = torch.split(exact, list(slices), dim=1)
    worst = torch.stack([(e.norm(dim=1) / t.norm(dim=1)).max() for e, t in zip(error, truth, strict=True)]).max()
    return Verdict(float(worst), TOLERANCE[actual.dtype], len(rows), bool(torch.isfinite(actual).all()))


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Every tensor that is allocated in here starts as NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])

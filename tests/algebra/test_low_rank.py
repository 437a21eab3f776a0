"""Updates and what low rank carries of them, against numpy."""

import numpy as np
import pytest
import torch

from scute.algebra import (
    Bias,
    Member,
    Rotation,
    Term,
    adapted,
    column_norms,
    evaluate,
    rank_of_exact_fold,
    scale_left_out,
    share_left_out,
    truncated_svd,
    update,
)

IN, OUT = 24, 20


@pytest.fixture
def random():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)


def members(random):
    term = Term(random(IN, 2), random(2, OUT), -1.5, d=random(2), e=random(OUT))
    return {
        "terms": Member(terms=(term, term)),
        "scale": Member(scale=random(OUT), terms=(term,)),
        "rotation": Member(rotation=Rotation(random(6, 4, 4)), scale=random(OUT)),
        "magnitude": Member(magnitude=random(OUT), terms=(Term(random(IN, 3), random(3, OUT), 2.0),)),
        "nothing": Member(),
    }


@pytest.mark.parametrize("name", ["terms", "scale", "rotation", "magnitude", "nothing"])
def test_the_update_is_what_evaluate_adds(random, name):
    member, weight = members(random)[name], random(IN, OUT)
    expected = evaluate(member, torch.eye(IN, dtype=torch.float64), weight, None) - weight
    torch.testing.assert_close(update(member, weight), expected, rtol=1e-11, atol=1e-11)


def test_a_small_update_keeps_its_digits():
    weight, scale = torch.full((2, 2), 3.0), torch.tensor([1 + 2**-20, 1 - 2**-20])
    assert torch.equal(update(Member(scale=scale), weight), weight * torch.tensor([2**-20, -(2**-20)]))


@pytest.mark.parametrize("rank", [1, 7, 20, 64])
def test_truncated_svd_is_numpys(random, rank):
    matrix = random(IN, OUT)
    a, b = truncated_svd(matrix, rank)
    left, values, right = np.linalg.svd(matrix.numpy(), full_matrices=False)
    nearest = (left[:, :rank] * values[:rank]) @ right[:rank]
    assert a.shape == (IN, min(rank, OUT))
    np.testing.assert_allclose((a @ b).numpy(), nearest, atol=1e-12)
    left_out = np.linalg.norm(matrix.numpy() - nearest) ** 2 / np.linalg.norm(matrix.numpy()) ** 2
    assert share_left_out(matrix, rank) == pytest.approx(left_out, abs=1e-12)


def test_nothing_is_left_out_of_nothing():
    assert share_left_out(torch.zeros(3, 3), 1) == 0


def test_what_low_rank_leaves_of_doras_scale_is_numpys(random):
    weight, scale = random(IN, OUT), 1 + 0.002 * random(OUT)
    matrix = weight.numpy() @ np.diag(scale.numpy() - 1)
    left, values, right = np.linalg.svd(matrix)
    rest = matrix - (left[:, :4] * values[:4]) @ right[:4]
    assert scale_left_out(scale, weight, 4) == pytest.approx((rest**2).sum() / (matrix**2).sum(), rel=1e-9)


def test_the_rank_of_an_exact_fold(random):
    weight, term = random(IN, OUT), Term(random(IN, 3), random(3, OUT))
    few = torch.ones(OUT, dtype=torch.float64)
    few[:7] = 2.0
    assert rank_of_exact_fold(Member(scale=few), weight) == 7
    assert rank_of_exact_fold(Member(scale=few, terms=(term,)), weight) == 4
    assert rank_of_exact_fold(Member(scale=random(OUT)), weight) == OUT
    assert rank_of_exact_fold(Member(terms=(term,)), weight) == 0
    narrow = random(IN, 5) @ random(5, OUT)
    assert rank_of_exact_fold(Member(scale=random(OUT)), narrow) == 5
    with pytest.raises(ValueError, match="rotation"):
        rank_of_exact_fold(Member(rotation=Rotation(random(6, 4, 4))), weight)


def test_a_member_of_that_rank_exists_and_none_of_less(random):
    weight, scale = random(IN, OUT), random(OUT)
    dora = Member(magnitude=scale.abs(), terms=(Term(random(IN, 2), random(2, OUT)),))
    resolved = dora.resolve_magnitude(column_norms(weight, dora.terms))
    least = rank_of_exact_fold(dora, weight)
    assert least == OUT - 2
    assert torch.linalg.matrix_rank(update(resolved, weight)) >= least
    assert share_left_out(update(resolved, weight), least - 1) > 1e-6


def test_a_model_is_adapted_for_as_long_as_the_block(random):
    model = torch.nn.Sequential(
        torch.nn.Linear(IN, OUT), torch.nn.Tanh(), torch.nn.Linear(OUT, IN, bias=False)
    ).double()
    member, x = Member(scale=random(OUT), bias=Bias(scaled=True, shift=random(OUT))), random(3, IN)
    before = model(x)
    with adapted(model, {"0": member}):
        inside = model(x)
    expected = evaluate(member, x, model[0].weight.T, model[0].bias)
    torch.testing.assert_close(inside, model[2](expected.tanh()))
    assert torch.equal(model(x), before)

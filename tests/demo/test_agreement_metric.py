"""The agreement metric, on differences that are known by construction."""

import pytest
import torch

from scute.agreement import agreement, mean_difference


def test_effect_and_error_are_means_over_tokens_not_over_prompts():
    base = [torch.zeros(1), torch.zeros(3)]
    peft = [torch.tensor([4.0]), torch.tensor([-1.0, 1.0, 2.0])]
    engine = [torch.tensor([4.0]), torch.tensor([-1.0, 1.0, 2.4])]
    agreed = agreement(base, peft, engine)
    assert agreed.effect == pytest.approx(2.0)
    assert agreed.error == pytest.approx(0.1)
    assert agreed.ratio == pytest.approx(0.05)


def test_an_adapter_without_effect_agrees_with_nothing():
    same = [torch.zeros(2)]
    assert agreement(same, same, same).ratio == float("inf")


@pytest.mark.parametrize(
    "other",
    [[torch.zeros(3)], [torch.zeros(2), torch.zeros(2)], [torch.tensor([0.0, float("nan")])]],
    ids=["another length", "another prompt", "not a number"],
)
def test_runs_that_cannot_be_compared_are_refused(other):
    with pytest.raises(ValueError, match=r"different prompts|not finite"):
        mean_difference([torch.zeros(2)], other)

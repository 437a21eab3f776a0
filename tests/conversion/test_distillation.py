"""Distillation: better than where it starts, the same for a seed, and the same when it was stopped in between."""

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from scute.conversion import Training
from scute.conversion.distillation import STATE_FILE, Distillation

TRAINING = Training(steps=6, batch=2, keep_every=3)


def distil(shop, out, training=TRAINING, **settings):
    folder, done = shop.convert(shop.adapter("oft", "oft"), out, 8, "distill", training=training, **settings)
    return load_file(folder / "adapter_model.safetensors"), done


def same(left, right):
    return left.keys() == right.keys() and all(bool((left[name] == right[name]).all()) for name in left)


def test_it_errs_less_than_the_svd_that_it_starts_from(tiny):
    _, start = tiny.convert(tiny.adapter("oft", "oft"), "oft-start", 8)
    _, done = distil(tiny, "oft-distilled", Training(steps=40, batch=2))
    assert done.agreement.ratio < 0.9 * start.agreement.ratio
    assert done.left_out > start.left_out
    assert "fitted" in done.notes[0]


def test_a_seed_is_a_result(tiny):
    first, _ = distil(tiny, "one")
    assert same(first, distil(tiny, "two")[0])
    other = Training(steps=6, batch=2, keep_every=3, seed=1)
    assert not same(first, distil(tiny, "three", other)[0])


def test_a_stopped_run_goes_on_to_the_same_end(tiny, monkeypatch):
    whole, _ = distil(tiny, "whole")
    keep = Distillation._keep

    def keep_and_stop(self, *arguments):
        keep(self, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(Distillation, "_keep", keep_and_stop)
    with pytest.raises(KeyboardInterrupt):
        distil(tiny, "stopped")
    monkeypatch.undo()
    state = tiny.root / ".stopped.distill"
    assert (state / STATE_FILE).exists()
    assert not (tiny.root / "stopped").exists()
    with pytest.raises(ValueError, match="another distillation"):
        distil(tiny, "stopped", Training(steps=7, batch=2, keep_every=3))
    assert same(whole, distil(tiny, "stopped")[0])
    assert not state.exists()


def step_of(**metadata):
    return lambda path, tensors: save_file(tensors, path, metadata=metadata)


def cut(path, _):
    os.truncate(path, 100)


def without_one(path, tensors):
    tensors.popitem()
    save_file(tensors, path, metadata={"run": "this", "step": "3"})


def of_another_shape(path, tensors):
    save_file({name: t[:1].contiguous() for name, t in tensors.items()}, path, metadata={"run": "this", "step": "3"})


@pytest.mark.parametrize(
    "spoil", [cut, without_one, of_another_shape, step_of(run="this"), step_of(run="this", step="many")]
)
def test_a_damaged_state_says_what_to_do(spoil, tmp_path):
    factors = {"m.a": torch.ones(3, 2, requires_grad=True), "m.b": torch.ones(2, 3, requires_grad=True)}
    optimizer = torch.optim.Adam(factors.values())
    sum(factor.sum() for factor in factors.values()).backward()
    optimizer.step()
    distillation = Distillation(TRAINING, tmp_path / "state", "this")
    distillation._keep(3, factors, optimizer)
    assert distillation._restore(factors, optimizer) == 3
    path = tmp_path / "state" / STATE_FILE
    spoil(path, load_file(path))
    with pytest.raises(ValueError, match=r"damaged.*remove that folder"):
        distillation._restore(factors, optimizer)


def test_what_is_exact_is_not_trained(tiny):
    _, done = tiny.convert(tiny.adapter("lora-r8", "lora-r8"), "lora-distilled", 8, "distill", training=TRAINING)
    assert {layer.route for layer in done.layers} == {"exact"}
    assert done.notes == ()


def test_a_run_that_diverges_is_not_written(tiny):
    with pytest.raises(ValueError, match=r"diverged.*--learning-rate 1e\+30"):
        distil(tiny, "diverged", Training(steps=4, batch=2, learning_rate=1e30))
    assert not (tiny.root / "diverged").exists()


@pytest.mark.parametrize("method", ["asvd", "distill"])
def test_it_needs_text(tiny, method):
    with pytest.raises(ValueError, match=r"fitted on text.*--data"):
        tiny.convert(tiny.adapter("oft", "oft"), "no-text", 8, method, data=None)

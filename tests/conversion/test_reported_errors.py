"""What a conversion reports, against numpy on PEFT's merged weights and PEFT's forward of both folders."""

import copy

import numpy as np
import pytest
import torch
from peft import IA3Config, OFTConfig, PeftModel

from scute.agreement import agreement
from scute.testing.adapters import AMPLIFIED, Recipe

DEMO_TARGETS = tuple(f"model.layers.15.{part}" for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj"))
RECIPES = {
    ("tiny", "ia3"): AMPLIFIED["ia3-attention"],
    ("tiny", "oft"): AMPLIFIED["oft"],
    ("demo", "ia3"): Recipe("(IA)3", IA3Config, 6, DEMO_TARGETS, {"feedforward_modules": []}, 2),
    ("demo", "oft"): Recipe("OFT", OFTConfig, 10, DEMO_TARGETS, {"oft_block_size": 32}, 2),
}


@pytest.fixture(params=["tiny", "demo"])
def workshop(request):
    return request.param, request.getfixturevalue(request.param)


def merged_updates(workshop, adapter, modules):
    """PEFT's merged weight less the base weight, [in, out], float64."""
    merged = PeftModel.from_pretrained(copy.deepcopy(workshop.oracle.base), str(adapter)).merge_and_unload()
    weight = lambda model, module: model.get_submodule(module).weight.detach().double().T  # noqa: E731
    return {module: (weight(merged, module) - weight(workshop.oracle.base, module)).numpy() for module in modules}


def inputs_under_peft(workshop, adapter, modules):
    """What goes into each projection while PEFT runs the adapter on the text, [tokens, in], float64."""
    seen = {module: [] for module in modules}
    model = PeftModel.from_pretrained(copy.deepcopy(workshop.oracle.base), str(adapter)).eval()
    for module in modules:
        layer = model.base_model.model.get_submodule(module)
        layer.register_forward_pre_hook(lambda _, given, rows=seen[module]: rows.append(given[0][0].double().numpy()))
    with torch.inference_mode():
        for prompt in workshop.prompts:
            model(input_ids=torch.tensor([prompt]))
    return {module: np.concatenate(rows) for module, rows in seen.items()}


def nearest(matrix, rank):
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    return (left[:, :rank] * values[:rank]) @ right[:rank]


def nearest_on(matrix, inputs, rank):
    """The nearest on these inputs, by another route than the code's: symmetric whitening by an eigendecomposition."""
    moment = inputs.T @ inputs / len(inputs)
    values, vectors = np.linalg.eigh(moment + 1e-6 * np.trace(moment) / len(moment) * np.eye(len(moment)))
    root = (vectors * np.sqrt(values)) @ vectors.T
    return (vectors / np.sqrt(values)) @ vectors.T @ nearest(root @ matrix, rank)


def rest(matrix, approximation):
    return np.linalg.norm(matrix - approximation) ** 2 / np.linalg.norm(matrix) ** 2


@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize("method", ["svd", "asvd"])
@pytest.mark.parametrize("name", ["ia3", "oft"])
def test_reported_errors_are_numpys_and_pefts(workshop, name, method, rank):
    kind, shop = workshop
    adapter = shop.adapter(RECIPES[kind, name], f"{name}-reported")
    out, done = shop.convert(adapter, f"{name}-{method}-{rank}", rank, method)
    modules = [layer.module for layer in done.layers]
    updates, inputs = merged_updates(shop, adapter, modules), inputs_under_peft(shop, adapter, modules)
    for layer in done.layers:
        matrix, x = updates[layer.module], inputs[layer.module]
        expected = nearest(matrix, rank) if method == "svd" else nearest_on(matrix, x, rank)
        assert layer.left_out == pytest.approx(rest(matrix, expected), rel=1e-3, abs=1e-6)
        assert layer.route == method
        assert layer.rank == min(rank, *matrix.shape)
    runs = [shop.oracle.logprobs(shop.prompts, folder) for folder in (None, adapter, out)]
    independent = agreement(*runs)
    assert done.agreement.effect == pytest.approx(independent.effect, rel=1e-4)
    assert done.agreement.ratio == pytest.approx(independent.ratio, rel=1e-3, abs=1e-5)


def test_asvd_errs_less_on_its_text_than_svd(tiny):
    adapter = tiny.adapter("oft", "oft")
    ratios = {m: tiny.convert(adapter, f"oft-{m}-16", 16, m)[1].agreement.ratio for m in ("svd", "asvd")}
    assert ratios["asvd"] < ratios["svd"]

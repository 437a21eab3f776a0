"""Every plan can be run: its engines exist and can hold what they are to serve."""

import pytest
from serving.engines import ENGINES
from serving.plans import PLANS, engines_of, narrowed, served, tenants_of
from serving.pools import POOLS, kind_of
from serving.summary import COMPARISONS
from serving.tenants import KINDS


def rank_of(tenant: str) -> int:
    """Rank of a tenant's own factors; 0 without any."""
    recipe = KINDS[kind_of(tenant)]
    return recipe.options["r"] if recipe.method in ("LoRA", "DoRA") else 0


@pytest.mark.parametrize("name", PLANS)
def test_engines_hold_what_they_serve(name):
    plan = PLANS[name]
    for engine in engines_of(plan):
        kind = ENGINES[engine]
        for pool, variant in served(plan, engine):
            tenants = pool.distinct(variant)
            assert len(tenants) <= kind.loras
            for tenant in tenants:
                assert kind.scute or rank_of(tenant) <= kind.rank
                assert kind.scute or KINDS[kind_of(tenant)].method == "LoRA", f"{engine} cannot serve {tenant}"
        assert kind.arguments(len(tenants_of(plan, engine)))["max_num_seqs"] == 64


def test_the_pools_of_the_paper():
    methods = [KINDS[kind_of(tenant)].method for tenant in POOLS["five-methods"].tenants["own"]]
    assert {method: methods.count(method) for method in methods} == dict.fromkeys(
        ("LoRA", "DoRA", "(IA)3", "VeRA", "OFT"), 4
    )
    converted = POOLS["five-methods"].tenants["converted"]
    assert sorted({rank_of(tenant) for tenant in converted}) == [16, 64, 256]
    assert max(rank_of(tenant) for tenant in POOLS["five-methods-64"].tenants["converted"]) == 64
    assert {rank_of(tenant) for tenant in POOLS["mixed-ranks"].tenants["own"]} == {8, 16, 64, 256}
    assert POOLS["without-vera"].size == 16
    assert len(set(POOLS["five-methods"].tenants["lora"])) == 20


def test_every_comparison_is_measured_side_by_side_by_some_plan():
    cells = [cell for plan in PLANS.values() for block in plan for cell in block.cells]
    for comparison in COMPARISONS:
        arms = [{"/".join(arm) for arm in cell.arms} for cell in cells if cell.pool == comparison.pool]
        assert any({comparison.ours, comparison.other} <= of for of in arms), comparison


def test_a_plan_can_be_narrowed():
    plan = narrowed(PLANS["pools"], ["base", "scute"], ["five-methods decode:burst"])
    assert engines_of(plan) == ("base", "scute")
    assert {cell.name for block in plan for cell in block.cells} == {
        "five-methods decode:burst",
        "five-methods decode:burst:zipf",
    }

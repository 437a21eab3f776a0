"""Keys of cached prefixes: one set for every load of an adapter, and for requests that outlive theirs."""

from types import SimpleNamespace
from typing import Any

import pytest
from fake_core import Core, adapter
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from scute.engine import prefix_cache


def hashes(request: Request) -> list[Any]:
    """After the request has decoded 9 more tokens."""
    request.append_output_token_ids(list(range(10, 19)))
    assert len(request.block_hashes) == request.num_tokens // 4
    return list(request.block_hashes)


@pytest.fixture
def core(monkeypatch) -> Core:
    monkeypatch.setattr(prefix_cache, "_loads", prefix_cache.Counter())
    monkeypatch.setattr(prefix_cache, "_versions", {})
    plain = kv_cache_utils._gen_lora_extra_hash_keys
    while hasattr(plain, "__wrapped__"):
        plain = plain.__wrapped__
    monkeypatch.setattr(kv_cache_utils, "_gen_lora_extra_hash_keys", prefix_cache.with_version(plain))
    return Core()


def found(core: Core, adapter_id: int) -> list[Any]:
    """Hashes of a request that is queued and ends."""
    request = core.use("r", adapter_id)
    core.end("r")
    return hashes(request)


def test_one_load_is_found_again(core):
    core.add(adapter(1))
    assert found(core, 1) == found(core, 1)


def test_a_first_load_has_the_keys_of_vllm(core):
    core.add(adapter(1))
    request = SimpleNamespace(lora_request=adapter(1), request_id="r")
    assert kv_cache_utils._gen_lora_extra_hash_keys(request) == [("lora", "a", "/a")]
    assert kv_cache_utils._gen_lora_extra_hash_keys(SimpleNamespace(lora_request=None)) == []


def test_a_call_for_an_adapter_that_is_loaded_changes_nothing(core):
    core.add(adapter(1))
    before = found(core, 1)
    core.add(adapter(1))
    assert found(core, 1) == before


@pytest.mark.parametrize("number", [1, 2], ids=["same-id", "another-id"])
def test_a_second_load_finds_nothing_of_the_first(core, number: int):
    core.add(adapter(1))
    old = found(core, 1)
    core.remove(1)
    core.add(adapter(number))
    assert set(found(core, number)).isdisjoint(old)


@pytest.mark.parametrize("way", ["in-place", "removed-and-loaded", "another-id"])
def test_what_a_request_computes_on_the_old_weights_is_not_found_on_the_new(core, way: str):
    """All of its blocks are filled after the new weights came."""
    core.add(adapter(1))
    running = core.use("running", 1)
    number = 2 if way == "another-id" else 1
    if way == "removed-and-loaded":
        core.remove(1)
    core.add(adapter(number, load_inplace=way == "in-place"))
    if way == "another-id":
        core.remove(1)
    new = found(core, number)
    assert set(hashes(running)).isdisjoint(new)
    assert found(core, number) == new


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("path", ["/a", "/b"])
def test_a_request_on_its_way_has_the_keys_of_what_it_runs_on(core, path: str, is_used: bool):
    """Its blocks are hashed by another thread, before it is queued: the adapter may be replaced in between."""
    core.add(adapter(1))
    if is_used:
        core.use("running", 1)
    old, late = core.use("old", 1, length=9), core.arrive("late", 1, length=9)
    assert late.block_hashes == old.block_hashes != []
    core.end("old")
    core.add(adapter(1, path, load_inplace=True))
    core.queue(late)
    assert set(late.block_hashes).isdisjoint(old.block_hashes)
    assert core.use("new", 1, length=9, path=path).block_hashes == late.block_hashes


def test_an_adapter_that_is_not_known_shares_with_nobody(core):
    """A request that came past the front end, or after the removal of its adapter."""
    core.add(adapter(1))
    first = found(core, 1)
    core.remove(1)
    assert set(found(core, 1)).isdisjoint(first)
    assert set(hashes(core.use("other", 1))).isdisjoint(found(core, 1))


def test_versions_do_not_pile_up(core, monkeypatch):
    monkeypatch.setattr(prefix_cache, "MOST_COUNTED", 100)
    for number in range(1, 1000):
        core.add(adapter(number, f"/{number}"))
        core.remove(number)
    assert prefix_cache._versions == {}
    assert len(prefix_cache._loads) == 100


@pytest.mark.parametrize("most", [0, 1])
def test_one_that_is_not_counted_finds_nothing_of_an_earlier_load(core, monkeypatch, most: int):
    monkeypatch.setattr(prefix_cache, "MOST_COUNTED", most)
    core.add(adapter(1, "/first"))
    seen: list[Any] = []
    for _ in range(3):
        core.add(adapter(2))
        new = found(core, 2)
        assert set(new).isdisjoint(seen)
        assert found(core, 2) == new
        seen += new
        core.remove(2)

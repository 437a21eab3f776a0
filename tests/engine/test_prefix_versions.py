"""Keys of cached prefixes: one set for every load of an adapter, and for requests that outlive theirs."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from scute.engine import prefix_cache

BLOCK = 4
PROMPT = [1, 2, 3]
"""Shorter than a block: nothing is hashed when the request arrives."""


class Core:
    """What an engine core does of adapters and requests, with vLLM's own requests and hashes."""

    def __init__(self) -> None:
        self._hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)

    def _add(self, lora_request: LoRARequest) -> bool:
        return lora_request.lora_int_id > 0

    def _remove(self, lora_id: int) -> bool:
        return lora_id > 0

    def _preprocess(self, lora_request: LoRARequest | None) -> tuple[Request, int]:
        return Request("r", PROMPT, SamplingParams(), None, lora_request=lora_request, block_hasher=self._hasher), 0

    add = prefix_cache.count_loads(_add)
    remove = prefix_cache.forget_version(_remove)
    preprocess = prefix_cache.keep_version(_preprocess)

    def arrive(self, lora_request: LoRARequest | None) -> Request:
        return self.preprocess(lora_request)[0]


def hashes(request: Request) -> list[Any]:
    """After the request has decoded 9 more tokens."""
    request.append_output_token_ids(list(range(10, 19)))
    assert len(request.block_hashes) == 3
    return list(request.block_hashes)


@pytest.fixture
def core(monkeypatch) -> Core:
    kv_cache_utils.init_none_hash(sha256)
    monkeypatch.setattr(prefix_cache, "_loads", prefix_cache.Counter())
    monkeypatch.setattr(prefix_cache, "_loaded", {})
    plain = kv_cache_utils._gen_lora_extra_hash_keys
    while hasattr(plain, "__wrapped__"):
        plain = plain.__wrapped__
    monkeypatch.setattr(kv_cache_utils, "_gen_lora_extra_hash_keys", prefix_cache.with_version(plain))
    return Core()


def adapter(number: int, **options: Any) -> LoRARequest:
    return LoRARequest("a", number, "/a", **options)


def test_one_load_is_found_again(core):
    core.add(adapter(1))
    assert hashes(core.arrive(adapter(1))) == hashes(core.arrive(adapter(1)))


def test_a_first_load_has_the_keys_of_vllm(core):
    core.add(adapter(1))
    request = SimpleNamespace(lora_request=adapter(1))
    assert kv_cache_utils._gen_lora_extra_hash_keys(request) == [("lora", "a", "/a")]
    assert kv_cache_utils._gen_lora_extra_hash_keys(SimpleNamespace(lora_request=None)) == []


def test_a_call_for_an_adapter_that_is_loaded_changes_nothing(core):
    core.add(adapter(1))
    before = hashes(core.arrive(adapter(1)))
    core.add(adapter(1))
    assert hashes(core.arrive(adapter(1))) == before


@pytest.mark.parametrize("number", [1, 2], ids=["same-id", "another-id"])
def test_a_second_load_finds_nothing_of_the_first(core, number: int):
    core.add(adapter(1))
    old = hashes(core.arrive(adapter(1)))
    core.remove(1)
    core.add(adapter(number))
    assert set(hashes(core.arrive(adapter(number)))).isdisjoint(old)


@pytest.mark.parametrize("number", [1, 2], ids=["same-id", "another-id"])
def test_what_a_request_computes_on_the_old_weights_is_not_found_on_the_new(core, number: int):
    """All of its blocks are filled after the new weights came."""
    core.add(adapter(1))
    running = core.arrive(adapter(1))
    core.add(adapter(number, load_inplace=number == 1))
    if number == 2:
        core.remove(1)
    new = core.arrive(adapter(number))
    assert set(hashes(running)).isdisjoint(hashes(new))


def test_an_adapter_that_is_not_known_shares_with_nobody(core):
    """A request that came past the front end, or after the removal of its adapter."""
    core.add(adapter(1))
    first = hashes(core.arrive(adapter(1)))
    core.remove(1)
    assert set(hashes(core.arrive(adapter(1)))).isdisjoint(first)


def test_loaded_do_not_pile_up(core):
    for number in range(1, 1000):
        core.add(adapter(number))
        core.remove(number)
    assert prefix_cache._loaded == {}

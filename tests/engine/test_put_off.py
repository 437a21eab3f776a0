"""Removals that were put off for a stream, and loads that take their place before they leave for the engine."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from scute.engine import front_end
from scute.engine.admissions import Admissions


class Plain:
    """An engine client whose engine holds by id what it loaded. With a prompt that is a future, a request streams."""

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(lora_config=object())
        self.held: dict[int, str] = {}
        self.disk = "old"

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        if lora_request.lora_path == "/bad":
            raise OSError(lora_request.lora_path)
        if lora_request.load_inplace or lora_request.lora_int_id not in self.held:
            self.held[lora_request.lora_int_id] = self.disk
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        return self.held.pop(lora_id, None) is not None

    async def list_loras(self) -> set[int]:
        return set(self.held)

    async def add_request(self, request_id: str, prompt: Any, lora_request: LoRARequest | None = None) -> Any:
        assert request_id
        assert lora_request is not None
        return SimpleNamespace(_input_stream_task=prompt)


class Engine(Plain):
    add_lora = front_end._remember_admission_async(Plain.add_lora)
    remove_lora = front_end._forget_admission_async(Plain.remove_lora)
    add_request = front_end._admit_first_async(Plain.add_request)
    list_loras = front_end._list_kept(Plain.list_loras)


def adapter(path: str = "/a") -> LoRARequest:
    return LoRARequest("a", 1, path)


async def settle() -> None:
    while front_end._REMOVING:
        await asyncio.sleep(0)


def test_a_removal_leaves_after_the_stream(monkeypatch):
    monkeypatch.setattr(front_end, "check_folder", lambda *_: None)
    engine = Engine()

    async def scenario() -> None:
        stream = asyncio.get_running_loop().create_future()
        await engine.add_request("stream", stream, adapter())
        assert await engine.remove_lora(1)
        assert engine.held == {1: "old"}
        assert await engine.list_loras() == set()
        stream.set_result(None)
        await asyncio.sleep(0)
        await settle()
        assert engine.held == {}
        assert Admissions.of(engine).put_off == set()

    asyncio.run(scenario())


@pytest.mark.parametrize("one_fails", [False, True])
def test_a_request_that_the_removal_waits_for_takes_the_place(monkeypatch, one_fails: bool):
    """one_fails: there is another before it, which is refused."""
    may_read = {"/a": threading.Event(), "/bad": threading.Event()}
    monkeypatch.setattr(front_end, "check_folder", lambda _, path: may_read[path].wait(10))
    engine = Engine()

    async def scenario() -> None:
        stream = asyncio.get_running_loop().create_future()
        may_read["/a"].set()
        await engine.add_request("stream", stream, adapter())
        await engine.remove_lora(1)
        engine.disk = "new"
        may_read["/a"].clear()
        good, *bad = (
            asyncio.create_task(engine.add_request(path, None, adapter(path)))
            for path in ["/a", "/bad"][: 1 + one_fails]
        )
        await asyncio.sleep(0)
        stream.set_result(None)
        while 1 not in Admissions.of(engine)._removals:
            await asyncio.sleep(0)
        may_read["/bad"].set()
        for request in bad:
            with pytest.raises(OSError, match="/bad"):
                await request
        may_read["/a"].set()
        await good
        await settle()
        assert engine.held == {1: "new"}
        assert await engine.list_loras() == {1}
        assert Admissions.of(engine).has(adapter())
        await engine.remove_lora(1)
        assert engine.held == {}

    asyncio.run(scenario())

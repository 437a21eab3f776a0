"""The server's list of adapters, vLLM's own, with an engine that only remembers: names, reasons, ids and locks."""

import asyncio
import gc
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver

from scute.engine import front_end, hub, serving
from scute.engine.name_locks import NameLocks
from scute.errors import Code, Refusal

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FULL = Refusal(Code.CAPACITY_HOST, "the files of all adapters would exceed host_memory_gib.")


class Engine:
    """An engine client. error: what its engine answers to `add_lora`."""

    def __init__(self, scute: dict[str, Any]) -> None:
        self.vllm_config = SimpleNamespace(
            additional_config={"scute": scute},
            lora_config=object(),
            load_config=SimpleNamespace(download_dir=None),
            model_config=SimpleNamespace(model="base"),
        )
        self.model_config = self.vllm_config.model_config
        self.renderer = self.input_processor = None
        self.calls: list[tuple[str, Any]] = []
        self.error: Exception | None = None
        self.slow = False

    async def _add(self, lora_request: LoRARequest) -> bool:
        if self.slow:
            await asyncio.sleep(0.01)
        if self.error is not None:
            raise self.error
        self.calls.append(("add", (lora_request.lora_int_id, lora_request.lora_path)))
        return True

    async def _remove(self, lora_id: int) -> bool:
        self.calls.append(("remove", lora_id))
        return True

    async def _request(self, request_id: str, prompt: Any, params: Any, lora_request: Any = None) -> Any:  # noqa: ARG002
        if isinstance(prompt, AsyncGenerator):
            return SimpleNamespace(_input_stream_task=asyncio.create_task(self._stream(prompt, lora_request)))
        for _ in range(3 if prompt == "long" else 0):
            await asyncio.sleep(0.01)
        self.calls.append(("request", (request_id, lora_request.lora_int_id)))
        return request_id

    async def _stream(self, prompt: AsyncGenerator[str], lora_request: LoRARequest) -> None:
        async for chunk in prompt:
            self.calls.append(("chunk", (chunk, lora_request.lora_int_id)))

    async def _list(self) -> list[int]:
        return [7]

    add_lora = front_end._remember_admission_async(_add)
    remove_lora = front_end._forget_admission_async(_remove)
    list_loras = front_end._list_kept(_list)
    add_request = front_end._admit_first_async(_request)


class Models(OpenAIServingModels):
    """vLLM's, as Scute binds it."""

    __init__ = serving.with_resolvers(OpenAIServingModels.__init__)
    load_lora_adapter = serving.replace_or_refuse(OpenAIServingModels.load_lora_adapter)
    unload_lora_adapter = serving.release_unloaded(OpenAIServingModels.unload_lora_adapter)
    resolve_lora = serving.resolve_or_refuse(OpenAIServingModels.resolve_lora)

    async def load(self, name: str, path: Path | str, **options: Any) -> Any:
        return await self.load_lora_adapter(LoadLoRAAdapterRequest(lora_name=name, lora_path=str(path), **options))

    async def unload(self, name: str) -> Any:
        return await self.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=name))


def models_of(scute: dict[str, Any]) -> Models:
    return Models(Engine(scute), [BaseModelPath(name="base", model_path="base")])


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A root with adapters that compile, and one that does not."""

    def compile_stack(folders: list[Path], base: Any) -> None:  # noqa: ARG001
        if any(folder.name == "bad" for folder in folders):
            raise Refusal(Code.TENSOR_MISSING, "adapter_model.safetensors has no tensor x.")

    monkeypatch.setattr("scute.engine.base.compile_stack", compile_stack)
    monkeypatch.setattr("scute.engine.base.base_model_of", lambda *_: None)
    for name in ["one", "tenants/two", "bad"]:
        (tmp_path / "adapters" / name).mkdir(parents=True)
        (tmp_path / "adapters" / name / "adapter_config.json").write_text("{}")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "adapter_config.json").write_text("{}")
    return tmp_path / "adapters"


@pytest.fixture
def models(root) -> Models:
    return models_of({"allowed_roots": [str(root)]})


def resolve(models: Models, name: str) -> Any:
    return asyncio.run(models.resolve_lora(name))


def error_of(answer: Any) -> tuple[int, str]:
    return answer.error.code, answer.error.message


@pytest.mark.parametrize("name", ["one", "tenants/two"])
def test_a_name_under_a_root(models, root, name: str):
    found = resolve(models, name)
    assert (found.lora_name, found.lora_path) == (name, str(root / name))
    assert models.lora_requests == {name: found}
    assert models.engine_client.calls == [("add", (found.lora_int_id, str(root / name)))]
    assert resolve(models, name) is found
    assert len(models.engine_client.calls) == 1


@pytest.mark.parametrize("name", ["nowhere", "tenants", "one/two"])
def test_a_name_that_no_root_has_is_not_found(models, name: str):
    assert error_of(resolve(models, name))[0] == 404


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../outside", "~", "a\0b", "", ".", "x" * 300])
def test_a_name_that_breaks_the_rules_reaches_no_resolver(models, name: str):
    class Other(LoRAResolver):
        async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
            raise AssertionError((base_model_name, lora_name))

    models.lora_resolvers.insert(0, Other())
    status, message = error_of(resolve(models, name))
    assert status == 400
    assert message.startswith(f"[scute:{Code.SOURCE_NAME}] ")
    assert models.engine_client.calls == []


def test_a_link_out_of_the_root_is_refused(models, root):
    (root / "link").symlink_to(root.parent / "outside")
    status, message = error_of(resolve(models, "link"))
    assert (status, message.startswith(f"[scute:{Code.SOURCE_NOT_ALLOWED}] ")) == (400, True)
    assert str(root) not in message


def test_the_reason_of_a_folder_that_cannot_be_loaded(models):
    """vLLM says that it was found but could not be loaded, and no more."""
    status, message = error_of(resolve(models, "bad"))
    assert status == 400
    assert message == "[scute:tensor.missing] adapter_model.safetensors has no tensor x. (adapter 'bad')"
    assert models.lora_requests == {}


def test_the_reason_of_the_engine(models):
    models.engine_client.error = RuntimeError(f"Call to add_lora method failed: {FULL}")
    assert error_of(resolve(models, "one")) == (400, f"{FULL} (adapter 'one')")
    models.engine_client.error = RuntimeError("CUDA out of memory")
    assert error_of(resolve(models, "one")) == (400, "LoRA adapter 'one' was found but could not be loaded.")


def test_names_of_a_server(root):
    models = models_of({"allowed_roots": [str(root)], "allowed_names": "tenants/.*"})
    assert resolve(models, "tenants/two").lora_name == "tenants/two"
    assert error_of(resolve(models, "one"))[0] == 400


def test_without_options_there_is_no_resolver_of_scute():
    models = models_of({})
    assert models.lora_resolvers == []
    assert error_of(resolve(models, "../anything"))[0] == 404


def test_a_folder_of_an_allowed_repository(root, monkeypatch):
    fetched: list[hub.Repository] = []

    def fetch(repository: hub.Repository, limit_gib: float | None, *, fresh: bool) -> Path:
        assert (limit_gib, fresh) == (2.0, False)
        fetched.append(repository)
        if repository.folder == "missing":
            raise hub.missing(str(repository))
        return root / "one"

    monkeypatch.setattr(hub, "fetch", fetch)
    models = models_of({"allowed_repositories": {"org/name": COMMIT}, "adapter_file_gib": 2})
    found = resolve(models, "org/name/tenants/7")
    assert found.lora_path == "org/name/tenants/7", "each rank may be on another host"
    assert set(fetched) == {hub.Repository("org/name", COMMIT, "tenants/7")}
    status, message = error_of(resolve(models, "org/name/missing"))
    assert (status, message.startswith(f"[scute:{Code.FOLDER_MISSING}] ")) == (400, True)
    assert error_of(resolve(models, "org/other"))[0] == 404
    assert len(set(fetched)) == 2


@pytest.mark.parametrize("path", ["{}/../outside", "/etc", "org/name"])
def test_load_calls_obey_the_roots(models, root, path: str):
    status, message = error_of(asyncio.run(models.load("x", path.format(root))))
    assert (status, message.startswith(f"[scute:{Code.SOURCE_NOT_ALLOWED}] ")) == (400, True)
    assert models.engine_client.calls == []
    assert asyncio.run(models.load("x", root / "one")).startswith("Success")


def test_a_load_in_place_gets_an_id_of_its_own_and_the_old_one_goes(models, root):
    async def scenario() -> None:
        await models.load("x", root / "one")
        old = models.lora_requests["x"]
        old_id = old.lora_int_id
        assert (await models.load("x", root / "tenants/two", load_inplace=True)).startswith("Success")
        new = models.lora_requests["x"]
        assert (new.lora_int_id > old_id, new.load_inplace) == (True, False)
        assert (old.lora_int_id, old.lora_path) == (new.lora_int_id, new.lora_path), "for requests not yet queued"
        assert models.engine_client.calls == [
            ("add", (old_id, str(root / "one"))),
            ("add", (new.lora_int_id, str(root / "tenants/two"))),
            ("remove", old_id),
        ]
        assert await models.engine_client.add_request("r", "short", None, lora_request=old) == "r"
        assert models.engine_client.calls[-1] == ("request", ("r", new.lora_int_id))

    asyncio.run(scenario())


def test_a_refused_load_in_place_leaves_the_old_adapter(models, root):
    async def scenario() -> None:
        await models.load("x", root / "one")
        old = models.lora_requests["x"]
        assert error_of(await models.load("x", root / "bad", load_inplace=True))[0] == 400
        assert models.lora_requests["x"] is old
        assert (old.lora_int_id, old.lora_path) == (1, str(root / "one"))
        assert [call for call, _ in models.engine_client.calls] == ["add"]

    asyncio.run(scenario())


def test_loads_in_place_at_once_leave_one_adapter(models, root):
    models.engine_client.slow = True

    async def scenario() -> None:
        await models.load("x", root / "one")
        await asyncio.gather(*(models.load("x", root / "one", load_inplace=True) for _ in range(8)))

    asyncio.run(scenario())
    added = {value[0] for call, value in models.engine_client.calls if call == "add"}
    removed = [value for call, value in models.engine_client.calls if call == "remove"]
    assert added - set(removed) == {models.lora_requests["x"].lora_int_id}
    assert len(removed) == len(set(removed)) == 8


def test_unloading_removes_the_adapter_from_the_engine(models, root):
    async def scenario() -> None:
        await models.load("x", root / "one")
        assert (await models.unload("x")).startswith("Success")
        assert models.engine_client.calls[-1] == ("remove", 1)
        assert error_of(await models.unload("x"))[0] == 404
        assert len(models.engine_client.calls) == 2

    asyncio.run(scenario())


def test_an_unloaded_name_under_a_root_is_looked_up_again(models):
    first = resolve(models, "one")
    asyncio.run(models.unload("one"))
    assert resolve(models, "one").lora_int_id > first.lora_int_id


def test_a_removal_waits_for_requests_on_their_way_to_the_engine(models, root):
    """One that came to the engine after the removal would have the adapter loaded in a step."""

    async def scenario() -> None:
        await models.load("x", root / "one")
        adapter = models.lora_requests["x"]
        on_its_way = asyncio.create_task(models.engine_client.add_request("r", "long", None, lora_request=adapter))
        await asyncio.sleep(0)
        await models.unload("x")
        await on_its_way
        assert models.engine_client.calls[1:] == [("request", ("r", 1)), ("remove", 1)]

    asyncio.run(scenario())


def test_a_request_on_its_way_follows_the_new_version_of_its_adapter(models, root):
    """Until it has left with the id of that version, which is not removed before."""

    async def scenario() -> None:
        await models.load("x", root / "one")
        adapter = models.lora_requests["x"]
        on_its_way = asyncio.create_task(models.engine_client.add_request("r", "long", None, lora_request=adapter))
        await asyncio.sleep(0)
        await models.load("x", root / "tenants/two", load_inplace=True)
        await models.unload("x")
        await on_its_way
        assert [call for call in models.engine_client.calls if call[0] != "add"] == [
            ("remove", 1),
            ("request", ("r", 2)),
            ("remove", 2),
        ]

    asyncio.run(scenario())


def test_a_request_that_comes_after_the_removal_is_refused(models, root):
    """It named the adapter before, and would bring it back for good."""

    async def scenario() -> None:
        await models.load("x", root / "one")
        adapter = models.lora_requests["x"]
        await models.unload("x")
        with pytest.raises(ValueError, match="'x' was unloaded"):
            await models.engine_client.add_request("r", "short", None, lora_request=adapter)
        assert [call for call, _ in models.engine_client.calls] == ["add", "remove"]

    asyncio.run(scenario())


def test_a_request_that_comes_during_a_removal_has_the_adapter_admitted_anew(root):
    """Of an engine client without a server, where ids are the caller's."""
    engine = Engine({})
    adapter = LoRARequest("x", 7, str(root / "one"))

    async def scenario() -> None:
        first = asyncio.create_task(engine.add_request("first", "long", None, lora_request=adapter))
        await asyncio.sleep(0.015)
        removal = asyncio.create_task(engine.remove_lora(7))
        await asyncio.sleep(0)
        second = asyncio.create_task(engine.add_request("second", "short", None, lora_request=adapter))
        await asyncio.gather(first, removal, second)

    asyncio.run(scenario())
    assert [call for call, _ in engine.calls] == ["add", "request", "remove", "add", "request"]


class Speaker:
    """A prompt that comes in chunks, when the test says so."""

    def __init__(self, engine: Engine, adapter: LoRARequest) -> None:
        self._engine, self._adapter = engine, adapter
        self._said: asyncio.Queue[str | None] = asyncio.Queue()

    async def __aenter__(self) -> "Speaker":
        queue = await self._engine.add_request("stream", self._prompt(), None, lora_request=self._adapter)
        self.task = queue._input_stream_task
        return self

    async def _prompt(self) -> AsyncGenerator[str]:
        while (chunk := await self._said.get()) is not None:
            yield chunk

    async def __aexit__(self, *_: object) -> None:
        self._said.put_nowait(None)
        await asyncio.sleep(0.01)

    async def say(self, chunk: str) -> None:
        self._said.put_nowait(chunk)
        await asyncio.sleep(0.001)


@pytest.fixture
def streamed(root) -> tuple[Engine, LoRARequest]:
    """An engine client without a server, and an adapter for it."""
    return Engine({}), LoRARequest("x", 7, str(root / "one"))


def test_a_removal_waits_for_the_end_of_a_stream_and_nobody_for_it(streamed):
    engine, adapter = streamed

    async def scenario() -> None:
        async with Speaker(engine, adapter) as first, Speaker(engine, adapter):
            assert await engine.list_loras() == {7}
            assert await engine.remove_lora(7)
            assert await engine.list_loras() == set(), "it is removed for whoever asks"
            await first.say("one")
            first.task.cancel()
            await asyncio.sleep(0.01)
            assert ("remove", 7) not in engine.calls

    asyncio.run(scenario())
    assert engine.calls == [("add", (7, adapter.lora_path)), ("chunk", ("one", 7)), ("remove", 7)]


def test_what_takes_the_place_of_an_adapter_of_a_stream_stays(streamed, root):
    """The removal that was put off is not its own. Where its load fails, the removal stands."""
    engine, adapter = streamed

    async def scenario() -> None:
        async with Speaker(engine, adapter) as speaker:
            await engine.remove_lora(7)
            with pytest.raises(Refusal):
                await engine.add_lora(LoRARequest("y", 7, str(root / "bad")))
            engine.error = RuntimeError(str(FULL))
            with pytest.raises(RuntimeError):
                await engine.add_lora(LoRARequest("y", 7, str(root / "tenants/two")))
            await asyncio.sleep(0.001)
            assert await engine.list_loras() == set()
            engine.error = None
            await engine.add_lora(LoRARequest("y", 7, str(root / "tenants/two")))
            assert await engine.list_loras() == {7}
            await speaker.say("late")

    asyncio.run(scenario())
    assert [call for call, _ in engine.calls] == ["add", "add", "chunk"]


def test_a_removal_that_waits_for_a_request_sees_the_stream_that_it_is(streamed):
    engine, adapter = streamed
    engine.slow = True

    async def scenario() -> None:
        speaker = Speaker(engine, adapter)
        opening = asyncio.create_task(speaker.__aenter__())
        await asyncio.sleep(0)
        removal = asyncio.create_task(engine.remove_lora(7))
        await opening
        assert await removal
        await speaker.say("one")
        await speaker.__aexit__()

    asyncio.run(scenario())
    assert [call for call, _ in engine.calls] == ["add", "chunk", "remove"]


def test_a_stream_follows_the_new_version_of_its_adapter(models, root):
    """Of the server, which removes the old version then."""

    async def scenario() -> None:
        await models.load("x", root / "one")
        async with Speaker(models.engine_client, models.lora_requests["x"]) as speaker:
            await models.load("x", root / "tenants/two", load_inplace=True)
            await speaker.say("one")
            await models.unload("x")

    asyncio.run(scenario())
    assert [call for call in models.engine_client.calls if call[0] != "add"] == [
        ("remove", 1),
        ("chunk", ("one", 2)),
        ("remove", 2),
    ]


def test_a_client_that_goes_away_takes_nobody_along(root):
    """Neither the others that wait for the removal, nor the removal, nor one that the removal waits for."""
    engine = Engine({})
    adapter = LoRARequest("x", 7, str(root / "one"))

    async def scenario() -> None:
        held = asyncio.create_task(engine.add_request("held", "long", None, lora_request=adapter))
        await asyncio.sleep(0.015)
        removal = asyncio.create_task(engine.remove_lora(7))
        gone_removal = asyncio.create_task(engine.remove_lora(7))
        gone, stays = (
            asyncio.create_task(engine.add_request(name, "short", None, lora_request=adapter))
            for name in ("gone", "stays")
        )
        await asyncio.sleep(0.001)
        gone.cancel()
        gone_removal.cancel()
        assert await asyncio.gather(held, removal, stays) == ["held", True, "stays"]

    asyncio.run(scenario())
    requests = [told[0] for call, told in engine.calls if call == "request"]
    assert requests == ["held", "stays"]


def test_a_load_whose_caller_is_gone_is_undone(root):
    """The engine finishes it, and nobody would ever remove the adapter."""
    engine = Engine({})
    engine.slow = True
    adapter = LoRARequest("x", 7, str(root / "one"))

    async def scenario() -> None:
        load = asyncio.create_task(engine.add_lora(adapter))
        while not load.done():  # until the folder was checked, in a thread, and the engine was asked
            await asyncio.sleep(0.001)
            if engine_asked(load):
                load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        await asyncio.sleep(0.05)

    def engine_asked(load: asyncio.Task[Any]) -> bool:
        """The wrapped call has the name of the engine's own."""
        return any(task.get_coro().__qualname__ == "Engine._add" for task in asyncio.all_tasks() - {load})

    asyncio.run(scenario())
    assert [call for call, _ in engine.calls] == ["add", "remove"]
    assert front_end.Admissions.of(engine).admitted == set()


def test_unknown_names_leave_nothing_behind(models):
    async def scenario() -> None:
        for number in range(1000):
            await models.resolve_lora(f"unknown-{number}")
            await models.load(f"x-{number}", "/etc", load_inplace=True)
            await models.unload(f"y-{number}")

    asyncio.run(scenario())
    gc.collect()
    assert len(models.lora_resolver_lock) == 0


def test_a_lock_is_one_for_all_who_want_it():
    locks = NameLocks()
    order = []

    async def hold(number: int) -> None:
        async with locks["name"]:
            order.append(number)
            await asyncio.sleep(0.001)
            order.append(number)

    async def scenario() -> None:
        await asyncio.gather(*(hold(number) for number in range(5)))

    asyncio.run(scenario())
    assert order == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert len(locks) == 0


@pytest.mark.parametrize(
    ("scute", "allowed", "warns"),
    [
        ({"allowed_roots": ["/adapters"]}, "0", True),
        ({"allowed_repositories": {"org/name": COMMIT}}, "0", True),
        ({"allowed_roots": ["/adapters"]}, "1", False),
        ({}, "0", False),
    ],
)
def test_names_that_nobody_looks_up_are_a_warning(monkeypatch, scute: dict[str, Any], allowed: str, warns: bool):
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", allowed)
    lines: list[str] = []
    monkeypatch.setattr(serving.logger, "warning", lines.append)
    models_of(scute)
    assert ["VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in line for line in lines] == [True] * warns

"""The admission gate and the way back of a refusal, without an engine."""

import asyncio
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from vllm.entrypoints.serve import create_error_response
from vllm.lora.request import LoRARequest
from vllm.v1.engine.exceptions import EngineDeadError

from scute.engine import front_end, serving
from scute.engine.refusals import find_refusal
from scute.engine.stack_names import with_paths
from scute.errors import Code, Refusal

REFUSAL = Refusal(
    Code.TENSOR_MISSING, "adapter_model.safetensors has no tensor 'q_proj.lora_A'. The save is incomplete."
)
WORKER = "Worker failed with error '{}', please check the stack trace above for the root cause"
PROMPT = {"prompt_token_ids": [1, 2]}
CALL = "Call to add_lora method failed: {}"


@pytest.mark.parametrize("wrapped", ["{}", WORKER, CALL, CALL.format(WORKER)])
@pytest.mark.parametrize("code", Code)
def test_a_refusal_survives_the_way_to_the_caller(wrapped: str, code: Code):
    refusal = Refusal(code, REFUSAL.sentence)
    found = find_refusal(wrapped.format(refusal))
    assert found is not None
    assert (found.code, found.sentence, str(found)) == (code, REFUSAL.sentence, str(refusal))


def test_a_sentence_of_several_lines_is_whole():
    refusal = Refusal(Code.CONFIG_INVALID, "field r: 'eight'\nis no number.")
    found = find_refusal(CALL.format(WORKER.format(refusal)))
    assert found is not None
    assert found.sentence == refusal.sentence


@pytest.mark.parametrize(
    "text", ["", "CUDA out of memory", "[scute:] x", "[scute:no.such.code] x", "scute:tensor.missing x", WORKER]
)
def test_other_errors_are_no_refusals(text: str):
    assert find_refusal(text) is None


class FakeEngine:
    """An engine client that counts; `error` is what `add_lora` raises."""

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(lora_config=object(), model_config=None, additional_config={})
        self.error: Exception | None = None
        self.loads: list[tuple[int, str]] = []
        self.added: list[tuple[Any, ...]] = []
        self.loaded_in_place = False

    def add_lora(self, lora_request: LoRARequest) -> bool:
        self.loads.append((lora_request.lora_int_id, lora_request.lora_path))
        self.loaded_in_place = lora_request.load_inplace
        if self.error is not None:
            raise self.error
        return True

    def remove_lora(self, lora_id: int) -> bool:
        return lora_id > 0

    def add_request(self, request_id: str, prompt: Any, params: Any, lora_request: LoRARequest | None = None) -> str:
        assert lora_request is None or not lora_request.load_inplace, "the step would read the folder again"
        self.added.append((request_id, prompt, params))
        return request_id


class FakeAsyncEngine(FakeEngine):
    async def add_lora(self, lora_request: LoRARequest) -> bool:
        return super().add_lora(lora_request)

    async def remove_lora(self, lora_id: int) -> bool:
        return super().remove_lora(lora_id)

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, lora_request: LoRARequest | None = None
    ) -> str:
        return super().add_request(request_id, prompt, params, lora_request)


class Gate:
    """Calls a gated engine, of either kind, the same way."""

    def __init__(self, is_async: bool) -> None:
        if is_async:

            class Gated(FakeAsyncEngine):
                add_lora = front_end._remember_admission_async(FakeAsyncEngine.add_lora)
                remove_lora = front_end._forget_admission_async(FakeAsyncEngine.remove_lora)
                add_request = front_end._admit_first_async(FakeAsyncEngine.add_request)
        else:

            class Gated(FakeEngine):
                add_lora = front_end._remember_admission(FakeEngine.add_lora)
                remove_lora = front_end._forget_admission(FakeEngine.remove_lora)
                add_request = front_end._admit_first(FakeEngine.add_request)

        self.engine, self.is_async = Gated(), is_async

    def _result(self, value: Any) -> Any:
        return asyncio.run(value) if self.is_async else value

    def ask(self, adapter: LoRARequest | None, request_id: str = "r") -> str:
        return self._result(self.engine.add_request(request_id, PROMPT, None, lora_request=adapter))

    def load(self, adapter: LoRARequest) -> bool:
        return self._result(self.engine.add_lora(adapter))

    def remove(self, lora_id: int) -> bool:
        return self._result(self.engine.remove_lora(lora_id))


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def gate(request) -> Gate:
    return Gate(request.param)


def adapter(path: str = "/a", number: int = 1, **options: Any) -> LoRARequest:
    return LoRARequest("a", number, path, **options)


def test_base_rows_pass(gate):
    assert gate.ask(None) == "r"
    assert gate.engine.loads == []
    assert gate.engine.added == [("r", PROMPT, None)]


def test_an_adapter_is_admitted_once(gate):
    assert [gate.ask(adapter()) for _ in range(3)] == ["r"] * 3
    assert gate.engine.loads == [(1, "/a")]


def test_a_loaded_adapter_is_loaded_again_without_its_folder(gate, monkeypatch):
    checked = []
    monkeypatch.setattr(front_end, "check_folder", lambda _, path: checked.append(path))
    for _ in range(2):
        assert gate.load(adapter())
        gate.ask(adapter())
    assert (gate.engine.loads, checked) == ([(1, "/a")] * 2, ["/a"])
    assert gate.load(adapter("/b", load_inplace=True))
    gate.ask(adapter("/b"))
    with pytest.raises(ValueError, match="another adapter"):
        gate.load(adapter("/a"))
    assert (gate.engine.loads, checked) == ([(1, "/a")] * 2 + [(1, "/b")], ["/a", "/b"])


def test_every_adapter_is_admitted(gate):
    for each in [adapter("/a", 1), adapter("/b", 2), adapter("/b", 3), adapter("/a", 1), adapter("/b", 2)]:
        gate.ask(each)
    assert gate.engine.loads == [(1, "/a"), (2, "/b"), (3, "/b")]


def test_an_id_is_that_of_one_adapter(gate):
    """vLLM would answer with whichever of the two it has."""
    gate.ask(adapter("/a", 1))
    with pytest.raises(ValueError, match="lora_int_id 1 is the id of another adapter"):
        gate.ask(adapter("/b", 1))
    assert (gate.engine.loads, len(gate.engine.added)) == ([(1, "/a")], 1)
    gate.ask(adapter("/b", 1, load_inplace=True))
    gate.ask(adapter("/b", 1))
    with pytest.raises(ValueError, match="another adapter"):
        gate.ask(adapter("/a", 1))
    assert gate.remove(1)
    gate.ask(adapter("/a", 1))
    assert gate.engine.loads == [(1, "/a"), (1, "/b"), (1, "/a")]


def test_an_engine_without_lora_gives_its_own_answer(gate):
    gate.engine.vllm_config.lora_config = None
    gate.ask(adapter())
    assert (gate.engine.loads, len(gate.engine.added)) == ([], 1)


def test_a_refused_adapter_is_not_queued_and_asked_for_again(gate):
    gate.engine.error = RuntimeError(CALL.format(WORKER.format(REFUSAL)))
    for _ in range(2):
        with pytest.raises(Refusal) as refusal:
            gate.ask(adapter())
        assert str(refusal.value) == str(REFUSAL)
    assert (gate.engine.loads, gate.engine.added) == ([(1, "/a")] * 2, [])
    gate.engine.error = None
    gate.ask(adapter())
    gate.ask(adapter())
    assert (len(gate.engine.loads), len(gate.engine.added)) == (3, 2)


def test_another_error_is_raised_as_it_is(gate):
    gate.engine.error = RuntimeError("CUDA out of memory")
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        gate.ask(adapter())
    assert gate.engine.added == []


def test_a_removed_adapter_is_admitted_again(gate):
    gate.ask(adapter("/a", 1))
    gate.ask(adapter("/b", 2))
    assert gate.remove(1)
    gate.ask(adapter("/a", 1))
    gate.ask(adapter("/b", 2))
    assert gate.engine.loads == [(1, "/a"), (2, "/b"), (1, "/a")]


def test_in_place_loads_again(gate):
    gate.ask(adapter())
    gate.ask(adapter(load_inplace=True))
    assert gate.engine.loaded_in_place
    gate.ask(adapter())
    assert (gate.engine.loads, len(gate.engine.added)) == ([(1, "/a")] * 2, 3)


def test_a_refused_reload_leaves_the_admission(gate):
    gate.ask(adapter())
    gate.engine.error = RuntimeError(CALL.format(WORKER.format(REFUSAL)))
    with pytest.raises(Refusal):
        gate.ask(adapter("/b", load_inplace=True))
    gate.ask(adapter())
    assert (gate.engine.loads, len(gate.engine.added)) == ([(1, "/a"), (1, "/b")], 2)


def test_the_adapter_of_an_engine_core_request(gate):
    """The older spelling, in which the request carries its adapter."""

    class Request:
        lora_request = adapter("/c", 3)

    gate._result(gate.engine.add_request("r", Request(), None))
    assert gate.engine.loads == [(3, "/c")]


def test_two_engines_in_one_process_are_apart():
    first, second = Gate(False), Gate(False)
    first.ask(adapter())
    second.ask(adapter())
    assert first.engine.loads == second.engine.loads == [(1, "/a")]


def test_calls_fail_when_nobody_reads_their_answers():
    """Those that wait then, and those that are sent before the client knows."""

    class Client:
        def __init__(self) -> None:
            self.resources = SimpleNamespace(output_queue_task=None)
            self.utility_results: dict[int, asyncio.Future[int]] = {}

        def ensure(self) -> None:
            if self.resources.output_queue_task is None:
                self.resources.output_queue_task = asyncio.create_task(asyncio.sleep(60))

        ensure = front_end._fail_unanswered(ensure)

        def call(self, number: int) -> asyncio.Future[int]:
            self.utility_results[number] = asyncio.get_running_loop().create_future()
            self.ensure()
            return self.utility_results[number]

    async def end_while_two_wait() -> list[Any]:
        client = Client()
        first, second, third = client.call(1), client.call(2), client.call(3)
        client.utility_results.pop(1).set_result(7)
        third.cancel()
        client.resources.output_queue_task.cancel()
        found = await asyncio.gather(first, second, third, return_exceptions=True)
        return [*found, *await asyncio.gather(client.call(4), return_exceptions=True)]

    first, second, third, late = asyncio.run(asyncio.wait_for(end_while_two_wait(), timeout=10))
    assert (first, type(third)) == (7, asyncio.CancelledError)
    assert type(second) is type(late) is EngineDeadError


def answer_to(result: Any) -> Any:
    request = SimpleNamespace(lora_name="mine", lora_path="/mine")

    class Models:
        lora_requests: ClassVar = {}

        async def load_lora_adapter(self, request: Any) -> Any:
            assert request.lora_name == "mine"
            return result

    return asyncio.run(serving.replace_or_refuse(Models.load_lora_adapter)(Models(), request=request))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("/c", "/c"),
        ("lora", "lora"),
        ('scute+stack:["/c",  "/d"]', 'scute+stack:["/c",  "/d"]'),
        ('scute+stack:["lora", "./lora"]', 'scute+stack:["/a", "./lora"]'),
        ('scute+stack:["ia3", "lora", "else"]', 'scute+stack:["/b", "/a", "else"]'),
        ('scute+stack:["lora", "both"]', 'scute+stack:["/a", "/a", "/b"]'),
        ('scute+stack:["/e", "/f"]', 'scute+stack:["/e", "/f"]'),
        ('scute+stack:["lora"', 'scute+stack:["lora"'),
    ],
)
def test_a_stack_may_name_loaded_adapters(given: str, expected: str):
    paths = {"lora": "/a", "ia3": "/b", "both": 'scute+stack:["/a", "/b"]', "/e": "/other"}
    loaded = {name: LoRARequest(name, i, path) for i, (name, path) in enumerate(paths.items(), start=1)}
    assert with_paths(given, loaded) == expected


def test_a_refused_load_is_a_bad_request():
    message = CALL.format(WORKER.format(REFUSAL))
    answer = answer_to(
        create_error_response(message, err_type="InternalServerError", status_code=HTTPStatus.INTERNAL_SERVER_ERROR)
    )
    assert (answer.error.code, answer.error.type, answer.error.message) == (
        400,
        "BadRequestError",
        f"{REFUSAL} (adapter 'mine')",
    )


def test_a_folder_that_is_not_there_stays_not_found():
    missing = Refusal(Code.FOLDER_MISSING, "/nowhere is not a folder.")
    answer = answer_to(create_error_response(str(missing), status_code=HTTPStatus.INTERNAL_SERVER_ERROR))
    assert (answer.error.code, answer.error.type, answer.error.message) == (
        404,
        "NotFoundError",
        f"{missing} (adapter 'mine')",
    )


def test_another_failure_of_a_load_stays_what_it_is():
    answer = answer_to(
        create_error_response("no memory", err_type="InternalServerError", status_code=HTTPStatus.INTERNAL_SERVER_ERROR)
    )
    assert (answer.error.code, answer.error.type, answer.error.message) == (500, "InternalServerError", "no memory")
    assert answer_to("Success") == "Success"

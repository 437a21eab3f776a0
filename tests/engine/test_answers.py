"""A refusal travels as an answer of every worker, and becomes an exception where all of them are read."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from scute.engine import refusals
from scute.errors import Code, Refusal

REASON = Refusal(Code.CAPACITY_RANK, "LoRA rank 16 is greater than max_lora_rank 8.")
PEER = Refusal(Code.PEER_RANK_FAILED, "another rank of the engine could not admit it; its message says why.")


class Executor:
    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def collective_rpc(self, name: str, args: tuple[Any, ...]) -> list[Any]:
        assert (name, args) == ("add_lora", ("request",))
        return self.answers

    def _add(self, lora_request: Any) -> bool:
        raise AssertionError(f"vLLM would drop the answers for {lora_request}")

    add_lora = refusals.raise_answered_refusal(_add)


def test_a_worker_answers_with_the_sentence():
    def add_lora(_: Any, request: Any) -> bool:
        if request == "bad":
            raise REASON
        return True

    answering = refusals.answer_with_refusal(add_lora)
    assert answering(None, "good") is True
    assert answering(None, "bad") == str(REASON)


@pytest.mark.parametrize("answers", [(REASON, PEER), (PEER, REASON), (REASON,)])
def test_the_executor_raises_the_reason_whichever_rank_has_it(answers: tuple[Refusal, ...]):
    with pytest.raises(Refusal) as raised:
        Executor(*map(str, answers)).add_lora("request")
    assert (raised.value.code, str(raised.value)) == (REASON.code, str(REASON))


def test_without_a_refusal_every_rank_has_to_agree():
    assert Executor(True, True).add_lora("request")
    assert not Executor(True, False).add_lora("request")


def test_any_other_error_is_an_answer_too():
    """Else the answers of the ranks that did not fail would be taken for those of the next call."""

    def add_lora(_: Any, request: Any) -> bool:
        raise MemoryError(f"no memory for {request.lora_name}")

    answer = refusals.answer_with_refusal(add_lora)(None, SimpleNamespace(lora_name="large"))
    assert answer == "MemoryError: no memory for large"
    for answers in [(answer, str(PEER)), (str(PEER), answer), (True, answer)]:
        with pytest.raises(RuntimeError, match="MemoryError: no memory for large"):
            Executor(*answers).add_lora("request")

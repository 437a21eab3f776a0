"""The adapter of every row of a step as arrays, where vLLM makes tuples of as many Python integers.

A tuple of 8,192 NumPy integers takes longer to make, to compare and to read than everything else that a step needs.

The adapters of a step are listed by id. vLLM makes a set of them, in which two versions of one name are one: the other
would have no slot, or lose it.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.lora.layers import LoRAMapping
from vllm.lora.request import LoRARequest
from vllm.v1.worker.gpu.lora_utils import LoraState

Ids = npt.NDArray[np.int32]


class RowMapping(LoRAMapping):
    """vLLM's mapping of a step; it keeps what it is given, arrays or tuples."""

    def __post_init__(self) -> None:
        """vLLM's makes tuples here."""


class RowState(LoraState):
    """The adapters of the requests that the V2 model runner holds."""

    def make_lora_inputs(
        self, req_ids: list[str], idx_mapping: npt.NDArray[Any], num_scheduled_tokens: npt.NDArray[Any]
    ) -> tuple[Ids, Ids, list[LoRARequest]]:
        """Ids by request and by row, and the adapters of the step."""
        ids = self.lora_ids[idx_mapping]
        return ids, ids.repeat(num_scheduled_tokens), self.get_activate_loras(req_ids)

    def get_activate_loras(self, req_ids: list[str]) -> list[LoRARequest]:
        """The adapters of these requests, each id once."""
        requests = (self.lora_requests.get(req_id) for req_id in req_ids)
        return list({request.lora_int_id: request for request in requests if request is not None}.values())


def with_every_version(make_lora_inputs: Callable[..., Any]) -> Callable[..., Any]:
    """Of the V1 model runner's batch: its adapters by id."""

    @functools.wraps(make_lora_inputs)
    def making(self: Any, num_scheduled_tokens: Any, num_sampled_tokens: Any) -> Any:
        by_request, by_row, _ = make_lora_inputs(self, num_scheduled_tokens, num_sampled_tokens)
        return by_request, by_row, list(self.lora_id_to_lora_request.values())

    return making

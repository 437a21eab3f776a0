"""The adapter of every row of a step as arrays, where vLLM makes tuples of as many Python integers.

A tuple of 8,192 NumPy integers takes longer to make, to compare and to read than everything else that a step needs.
"""

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


def is_same_adapter(self: LoRARequest, value: object) -> bool:
    """`LoRARequest.__eq__`. vLLM's compares names alone, and so forgets one of two adapters in a step's set.

    Two of one name run side by side where an adapter is unloaded while it is used, and its name is loaded anew.
    """
    return isinstance(value, LoRARequest) and (self.lora_name, self.lora_int_id) == (value.lora_name, value.lora_int_id)


def hash_of_adapter(self: LoRARequest) -> int:
    """`LoRARequest.__hash__`, to go with it."""
    return hash((self.lora_name, self.lora_int_id))


class RowState(LoraState):
    """The adapters of the requests that the V2 model runner holds."""

    def make_lora_inputs(
        self, req_ids: list[str], idx_mapping: npt.NDArray[Any], num_scheduled_tokens: npt.NDArray[Any]
    ) -> tuple[Ids, Ids, set[LoRARequest]]:
        """Ids by request and by row, and the adapters of the step."""
        ids = self.lora_ids[idx_mapping]
        return ids, ids.repeat(num_scheduled_tokens), self.get_activate_loras(req_ids)

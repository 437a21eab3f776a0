"""An engine core whose worker only remembers what it was told, with vLLM's own requests and hashes of blocks."""

from types import SimpleNamespace
from typing import Any

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from scute.engine import prefix_cache, removals

BLOCK = 4


def adapter(adapter_id: int, path: str = "/a", **options: Any) -> LoRARequest:
    return LoRARequest("a", adapter_id, path, **options)


class Core:
    """held: the path of what the worker has, by its id in the engine. fails: after the worker has the adapter."""

    def __init__(self) -> None:
        kv_cache_utils.init_none_hash(sha256)
        self._hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
        self.scheduler = SimpleNamespace(requests={})
        self.calls: list[tuple[str, Any]] = []
        self.held: dict[int, str] = {}
        self.fails = False
        self.pinned: set[int] = set()

    def _add(self, lora_request: LoRARequest) -> bool:
        self.calls.append(("add", (lora_request.lora_int_id, lora_request.load_inplace)))
        if lora_request.lora_path == "/bad":
            raise OSError(lora_request.lora_path)
        if lora_request.load_inplace or lora_request.lora_int_id not in self.held:
            self.held[lora_request.lora_int_id] = lora_request.lora_path
        if self.fails:
            raise RuntimeError("no slot")
        return True

    def _remove(self, lora_id: int) -> bool:
        self.calls.append(("remove", lora_id))
        return self.held.pop(lora_id, None) is not None

    def _list(self) -> set[int]:
        return set(self.held)

    def _pin(self, lora_id: int) -> bool:
        self.pinned.add(lora_id)
        return lora_id in self.held

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[int, ...] = ()) -> list[None]:
        assert (method, timeout) == ("scute_move_pin", None)
        old_id, new_id = args
        if old_id in self.pinned:
            self.pinned = self.pinned - {old_id} | {new_id}
        return [None]

    def _preprocess(self, request: EngineCoreRequest) -> tuple[Request, int]:
        return Request.from_engine_core_request(request, self._hasher), 0

    def _queue(self, request: Request, request_wave: int = 0) -> None:
        assert request_wave == 0
        self.scheduler.requests[request.request_id] = request

    def _post_step(self, model_executed: bool) -> None:
        self.calls.append(("step", model_executed))

    _counted, _forgetting = prefix_cache.count_loads(_add), prefix_cache.forget_version(_remove)
    add = removals.add_beside_used(_counted, _forgetting)
    remove = removals.remove_when_unused(_forgetting)
    list = removals.list_loaded(_list, _forgetting)
    pin = removals.pin_loaded(_pin)
    make = removals.make_with_loaded(_preprocess)
    queue = removals.queue_with_loaded(_queue)
    post_step = removals.finish_after_steps(_post_step, _forgetting)

    def arrive(self, name: str, adapter_id: int | None, path: str = "/a", length: int = 3) -> Request:
        """A request on its way to the queue. With 3 tokens nothing of it is hashed yet."""
        lora = None if adapter_id is None else adapter(adapter_id, path)
        prompt = [*range(1, length + 1)]
        return self.make(EngineCoreRequest(name, prompt, None, SamplingParams(), None, 0.0, lora, None, None))[0]

    def use(self, name: str, adapter_id: int | None, **more: Any) -> Request:
        """A request that is queued."""
        request = self.arrive(name, adapter_id, **more)
        self.queue(request)
        return request

    def end(self, name: str) -> None:
        del self.scheduler.requests[name]

    def serves(self, request: Request) -> str:
        """The path of the adapter whose weights a step of this request uses."""
        return self.held[request.lora_request.lora_int_id]

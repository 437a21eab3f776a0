"""The process of one engine: starts it, then does what the driver asks for, one thing at a time."""

import asyncio
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from serving import traces
from serving.client import Client
from serving.processes import parent


class Worker:
    def __init__(self) -> None:
        # Now, so that it is over when the base model has been written.
        import vllm.v1.engine.async_llm  # noqa: F401

        self.client: Client | None = None

    async def do(self, what: str, *values: Any) -> Any:
        if what == "start":
            start = time.perf_counter()
            self.client = Client(*values)
            return self.client.kv_cache_tokens, time.perf_counter() - start
        assert self.client is not None
        if what == "admit":
            for name, folder in values[0].items():
                await self.client.admit(name, folder)
            return None
        if what == "profile":
            return traces.read(await self.client.profiled(*values))
        return await {"score": self.client.score, "stream": self.client.stream}[what](*values)


async def work(pipe: Connection) -> None:
    worker = Worker()
    while True:
        try:
            request = await asyncio.to_thread(pipe.recv)
        except EOFError:
            break
        try:
            answer = ("ok", await worker.do(*request))
        except Exception as error:
            traceback.print_exc()
            answer = ("error", f"{type(error).__name__}: {error}")
        pipe.send(answer)
    if worker.client is not None:
        worker.client.close()


if __name__ == "__main__":
    asyncio.run(work(parent()))

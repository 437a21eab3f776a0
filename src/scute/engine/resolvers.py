"""vLLM's resolvers for adapters that a request names: in a local folder, and on the Hugging Face hub.

vLLM's own take LoRA only, look names up without a check, and forget why an adapter could not be loaded.
"""

import asyncio
from typing import TYPE_CHECKING

from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver

from scute.engine import hub
from scute.engine.sources import find_folder, find_repository

if TYPE_CHECKING:
    from scute.engine.options import Options

UNNUMBERED = 1
"""vLLM gives every adapter that it resolves an id of its own."""


class FolderResolver(LoRAResolver):
    """`tenant/adapter` is the folder of that name under an allowed root, whichever method it is of."""

    def __init__(self, options: "Options") -> None:
        self._options = options

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:  # noqa: ARG002
        """None if no root has it. Raises Refusal if a link leads out of the roots."""
        folder = await asyncio.to_thread(find_folder, lora_name, self._options)
        return None if folder is None else LoRARequest(lora_name, UNNUMBERED, str(folder))


class HubResolver(LoRAResolver):
    """`organisation/repository` is an allowed repository, and `organisation/repository/folder` a folder in it."""

    def __init__(self, options: "Options") -> None:
        self._options = options

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:  # noqa: ARG002
        """None if it is in no allowed repository. Raises Refusal if it cannot be fetched, or is too large."""
        repository = find_repository(lora_name, self._options)
        if repository is None:
            return None
        await asyncio.to_thread(hub.fetch, repository, self._options.adapter_file_gib, fresh=False)
        return LoRARequest(lora_name, UNNUMBERED, lora_name)


def resolvers_of(options: "Options") -> list[LoRAResolver]:
    """Those that the options call for."""
    resolvers: list[LoRAResolver] = []
    if options.allowed_roots is not None:
        resolvers.append(FolderResolver(options))
    if options.allowed_repositories is not None:
        resolvers.append(HubResolver(options))
    return resolvers

"""The PEFT library in float32: what every engine result is held against."""

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel


def load_base(folder: Path) -> PreTrainedModel:
    """The base model of a Hugging Face folder in float32 on the CPU, whatever dtype it is stored in."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


class Oracle:
    """One base model, with any adapter folder on top of it; it runs on the device that the model is on."""

    def __init__(self, base: Path | PreTrainedModel) -> None:
        self.base = base if isinstance(base, PreTrainedModel) else load_base(base)

    def logprobs(self, prompts: Sequence[Sequence[int]], adapter: Path | None = None) -> list[Tensor]:
        """Log-probability of every prompt token but the first, given those before it.

        prompts: token ids. Returns one float32 tensor [tokens - 1] per prompt, on the CPU, in nats.
        """
        model = self.base if adapter is None else self.adapted(adapter)
        return [_prompt_logprobs(model, prompt) for prompt in prompts]

    def adapted(self, adapter: Path) -> nn.Module:
        """The base model with the adapter on it, as PEFT loads it; the base itself stays as it is."""
        # PEFT replaces modules of the model it is given, so each adapter gets a copy.
        model: nn.Module = PeftModel.from_pretrained(copy.deepcopy(self.base), str(adapter))
        return model.eval()


@torch.inference_mode()
def _prompt_logprobs(model: nn.Module, prompt: Sequence[int]) -> Tensor:
    tokens = torch.tensor(prompt, device=next(model.parameters()).device)
    logits: Tensor = model(input_ids=tokens[None]).logits[0, :-1]
    return logits.float().log_softmax(dim=-1).gather(1, tokens[1:, None]).squeeze(1).cpu().cpu()

"""The base model as transformers runs it in float32, with members in place of its projections."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from scute.admission.base_folder import read_hf_config
from scute.algebra.adapted import adapted
from scute.algebra.form import Member

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_model(folder: Path, device: torch.device) -> "PreTrainedModel":
    """The causal language model of a folder in float32, frozen. Raises ValueError if there is none."""
    from transformers import AutoModelForCausalLM  # slow to import

    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except Exception as error:  # transformers raises whatever comes of the files
        reason = " ".join(str(error).split())
        raise ValueError(f"transformers cannot load the model of {folder}: {reason}") from error
    return model.to(device).eval().requires_grad_(False)


def vocabulary_of(folder: Path) -> int:
    """How many token ids the model of a folder takes, from its config alone. Raises ValueError."""
    size = getattr(read_hf_config(folder).get_text_config(), "vocab_size", None)
    if size is None:
        raise ValueError(f"{folder / 'config.json'} has no vocab_size, and a conversion runs on tokens")
    return int(size)


def logprobs(model: nn.Module, prompts: Sequence[Sequence[int]], members: Mapping[str, Member]) -> list[Tensor]:
    """Log-probability of every token but the first, in nats: one float32 tensor [tokens - 1] a prompt, on the CPU."""
    scores = []
    with torch.inference_mode(), adapted(model, members):
        for prompt in prompts:
            tokens = torch.tensor(prompt, device=device_of(model))
            predicted = logits(model, tokens)[:-1].log_softmax(dim=-1)
            scores.append(predicted.gather(1, tokens[1:, None]).squeeze(1).cpu())
    return scores


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """[tokens, vocabulary], float32, of one sequence [tokens]."""
    result: Tensor = model(input_ids=tokens[None], use_cache=False).logits[0]
    return result


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device

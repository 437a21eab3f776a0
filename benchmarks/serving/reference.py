"""The PEFT library in float32 on a model that does not fit the device beside the engines: layer by layer.

The layers are PEFT's own, in a model of one decoder layer that takes the weights of each layer in turn. What the model
says about a sequence under many adapters is so computed in one pass over its weights.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors import safe_open
from torch import Tensor
from transformers import LlamaConfig

from serving.pools import kind_of
from serving.tenants import one_layer, twin

BASE = "base"


class Reference:
    """One base model of Llama's structure, written by `write_base`."""

    def __init__(self, base: Path, device: str) -> None:
        self.config: LlamaConfig = LlamaConfig.from_pretrained(base)
        self.device = device
        self._files = json.loads((base / "model.safetensors.index.json").read_text())["weight_map"]
        self._base = base
        self._plain = one_layer(self.config, device)
        self._norm, self._plain.model.norm = self._plain.model.norm, torch.nn.Identity()

    @torch.no_grad()
    def logprobs(
        self, sequences: Sequence[Sequence[int]], adapters: Mapping[str, Path], tick: Callable[[], None] = lambda: None
    ) -> dict[str, Tensor]:
        """Log-probabilities of all tokens but the first, float32 [sequences, tokens - 1] on the CPU, in nats.

        sequences: token ids, all of one length. adapters: folders by tenant name. The key BASE holds the base model's.
        tick: called after every layer.
        """
        tokens = torch.tensor(sequences, device=self.device)
        start = self._weight("model.embed_tokens.weight")[tokens]
        hidden = dict.fromkeys([BASE, *adapters], start)
        wrapped = {kind: self._wrapped(folder) for kind, folder in {kind_of(n): f for n, f in adapters.items()}.items()}
        with ExitStack() as stack:
            files = {
                name: stack.enter_context(safe_open(folder / "adapter_model.safetensors", "pt", device=self.device))
                for name, folder in adapters.items()
            }
            keys = {name: list(file.keys()) for name, file in files.items()}
            for layer in range(self.config.num_hidden_layers):
                self._load_layer(layer)
                hidden[BASE] = _through(self._plain, hidden[BASE])
                for name, file in files.items():
                    model = wrapped[kind_of(name)]
                    _load_adapter(model, {key: file.get_tensor(key) for key in keys[name] if _is_of(key, layer)}, layer)
                    hidden[name] = _through(model.get_base_model(), hidden[name])
                tick()
        return self._scores(hidden, tokens)

    def _wrapped(self, folder: Path) -> PeftModel:
        return get_peft_model(twin(self._plain), PeftConfig.from_pretrained(str(folder))).eval()

    def _load_layer(self, layer: int) -> None:
        for name, parameter in self._plain.model.layers[0].named_parameters():
            parameter.copy_(self._weight(f"model.layers.{layer}.{name}"))

    def _scores(self, hidden: Mapping[str, Tensor], tokens: Tensor) -> dict[str, Tensor]:
        self._norm.weight.copy_(self._weight("model.norm.weight"))
        head = self._weight("lm_head.weight")
        scores = {}
        for name, values in hidden.items():
            logits = self._norm(values[:, :-1]) @ head.T
            scores[name] = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1).cpu()
        return scores

    def _weight(self, name: str) -> Tensor:
        with safe_open(self._base / self._files[name], "pt", device=self.device) as file:
            return file.get_tensor(name).float()


def _through(model: torch.nn.Module, hidden: Tensor) -> Tensor:
    """Through the one decoder layer of `model`, positions and causal mask included; [sequences, tokens, hidden]."""
    out: Tensor = model.model(inputs_embeds=hidden, use_cache=False).last_hidden_state
    return out


def _is_of(key: str, layer: int) -> bool:
    return f".layers.{layer}." in key or ".layers." not in key


def _load_adapter(model: PeftModel, tensors: dict[str, Tensor], layer: int) -> None:
    """Raises ValueError if a tensor has no place in PEFT's model, or a place of it no tensor."""
    mine = {key.replace(f".layers.{layer}.", ".layers.0."): value for key, value in tensors.items()}
    result = set_peft_model_state_dict(model, mine)
    owned = {name for name, _ in model.named_parameters() if ".default" in name}  # buffers of VeRA are listed twice
    missing = sorted(owned & set(result.missing_keys))
    if missing or result.unexpected_keys:
        raise ValueError(f"PEFT misses {missing} and does not know {result.unexpected_keys}")

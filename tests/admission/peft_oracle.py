"""PEFT's own forward as the oracle: one small model, run by PEFT and run through compiled members."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import torch
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from scute.admission import BaseModel, compile_adapter
from scute.algebra import AdapterForm, evaluate

WIDTH = 24


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, 36)
        self.v_proj = nn.Linear(WIDTH, 10, bias=False)
        self.o_proj = nn.Linear(46, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(torch.cat([self.q_proj(x), self.v_proj(x)], dim=-1))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, 60, bias=False)
        self.up_proj = nn.Linear(WIDTH, 60)
        self.down_proj = nn.Linear(60, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm = norm(WIDTH)
        self.self_attn = Attention()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm(x))
        return x + self.mlp(x)


class Toy(nn.Module):
    """Two layers with odd shapes, with and without biases; the MLPs are gated."""

    def __init__(self, norm: type[nn.Module] = nn.RMSNorm) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(7, WIDTH)
        self.layers = nn.ModuleList(Layer(norm) for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, 31, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def toy(dtype: torch.dtype = torch.float64, norm: type[nn.Module] = nn.RMSNorm) -> nn.Module:
    torch.manual_seed(0)
    return Toy(norm).to(dtype).eval()


def randomise(model: nn.Module, spread: float = 0.3) -> None:
    """Give every trained parameter a random value; magnitudes stay near the norms they start from."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or "ranknum" in name:  # of AdaLoRA; it is init_r, and is not saved
            continue
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        is_factor = "magnitude" in name or "ia3_l" in name
        with torch.no_grad():
            parameter.copy_(parameter * (1 + spread * noise) if is_factor else spread * noise)


def save(folder: Path, base: nn.Module, config: object, spread: float = 0.3) -> nn.Module:
    """A randomised adapter of that config, saved to the folder; returns PEFT's model."""
    model = get_peft_model(copy.deepcopy(base), config).eval()
    randomise(model, spread)
    model.save_pretrained(folder)
    return model


def rewrite_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Replace the tensors of a saved adapter by what `change` makes of them."""
    path = folder / "adapter_model.safetensors"
    changed = change(load_file(path))
    save_file({name: tensor.contiguous() for name, tensor in changed.items()}, path)


def rewrite_config(folder: Path, **fields: object) -> None:
    """Set fields of a saved config; a value of `...` removes the field."""
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def outputs_of(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The outputs of the model ("") and of all its projections, by their names in the base model."""
    outputs: dict[str, Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        if name.endswith(("_proj", "lm_head", "c_attn", "c_fc")):
            short = name.removeprefix("base_model.model.")
            handles.append(module.register_forward_hook(lambda *call, key=short: outputs.update({key: call[2]})))
    with torch.no_grad():
        out = model(x)
        outputs[""] = getattr(out, "logits", out)
    for handle in handles:
        handle.remove()
    return outputs


def served(base: nn.Module, form: AdapterForm) -> nn.Module:
    """The base model with `evaluate` in place of every adapted projection."""
    model = copy.deepcopy(base)
    for name, member in form.members.items():
        linear = model.get_submodule(name)
        weight = linear.weight if type(linear).__name__ == "Conv1D" else linear.weight.T
        linear.forward = lambda x, m=member, w=weight, b=linear.bias: evaluate(m, x, w, b)
    return model


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def assert_exact(
    folder: Path, base: nn.Module, adapted: nn.Module, tolerance: float = 1e-10, gated: bool = True, x=None
) -> AdapterForm:
    """Compile the folder and compare with PEFT's model: each projection, and the whole; the adapter must matter."""
    dtype = next(base.parameters()).dtype
    known = BaseModel.from_module(base, dtype, gated=gated)
    form = compile_adapter(folder, known)
    if x is None:
        x = torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected, found, plain = (outputs_of(m, x) for m in (adapted, served(base, form), base))
    # (IA)3 moves the scale of a down projection to the up projection, whose own output then differs from PEFT's.
    moved = set(known.gated_up.values()) if form.method == "(IA)3" else set()
    for name in set(found) - moved:
        assert relative(found[name], expected[name]) <= tolerance, name
    assert relative(found[""], plain[""]) >= 0.01, "the adapter has no effect, so the test shows nothing"
    return form

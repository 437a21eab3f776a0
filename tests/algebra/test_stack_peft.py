"""Two active adapters of the PEFT library against the stack of their members."""

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from scute.admission import BaseModel, compile_adapter
from scute.algebra import column_norms, evaluate, stack


def test_dora_on_lora_with_a_bias(tmp_path):
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(8, 6)).double()
    linear = nn.Linear(8, 6).double()
    linear.load_state_dict(base[0].state_dict())
    model = get_peft_model(base, LoraConfig(target_modules=["0"], r=2, lora_bias=True), "first")
    model.add_adapter("second", LoraConfig(target_modules=["0"], r=3, use_dora=True))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, mean=2.0 if "magnitude" in name else 0.0)
    model.save_pretrained(tmp_path)
    model.base_model.set_adapter(["first", "second"])
    known = BaseModel.from_module(nn.Sequential(linear))
    first, second = (compile_adapter(tmp_path / name, known).members["0"] for name in ("first", "second"))
    second = second.resolve_magnitude(column_norms(linear.weight.T, second.terms))
    x = torch.randn(4, 8, dtype=torch.float64)
    with torch.no_grad():
        found = evaluate(stack(first, second), x, linear.weight.T, linear.bias)
        torch.testing.assert_close(found, model.eval()(x), rtol=1e-10, atol=1e-10)

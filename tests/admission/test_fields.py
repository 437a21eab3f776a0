"""Every field of PEFT's configs has a place in the policy: used, inert or refused."""

import dataclasses

import pytest
from peft import AdaLoraConfig, IA3Config, LoraConfig, OFTConfig, VeraConfig

from scute.admission.methods import adalora, dora, ia3, lora, oft, vera

PEFT_CONFIGS = {
    lora.METHOD: LoraConfig,
    adalora.METHOD: AdaLoraConfig,
    dora.METHOD: LoraConfig,
    ia3.METHOD: IA3Config,
    vera.METHOD: VeraConfig,
    oft.METHOD: OFTConfig,
}


@pytest.mark.parametrize("method", PEFT_CONFIGS, ids=lambda method: method.name)
def test_every_field_has_one_place(method):
    model = method.config
    places = (model.model_fields.keys() - model.absent, model.inert, model.refused.keys())
    for field in dataclasses.fields(PEFT_CONFIGS[method]):
        assert sum(field.name in place for place in places) == 1, field.name


@pytest.mark.parametrize("method", PEFT_CONFIGS, ids=lambda method: method.name)
def test_every_used_field_is_one_of_peft(method):
    names = {field.name for field in dataclasses.fields(PEFT_CONFIGS[method])}
    assert method.config.model_fields.keys() - method.config.absent <= names
    assert not method.config.absent & names

"""The methods that Scute serves, and which of them a config belongs to."""

from scute.admission.methods import adalora, dora, ia3, lora, oft, vera
from scute.admission.methods.method import Method, RawConfig
from scute.admission.tensors import CONFIG_FILE
from scute.errors import Code, Refusal, shown

PROMPTS = "it adds learned vectors to the prompt or to the KV cache and changes no projection"
WHY_NOT = {
    **dict.fromkeys(
        ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "CARTRIDGE"), PROMPTS
    ),
    "ADAPTION_PROMPT": "it adds attention to learned vectors, which is no projection",
    "LN_TUNING": "it trains norms, and Scute serves linear projections only",
    "TRAINABLE_TOKENS": "it replaces rows of the embedding, and Scute serves linear projections only",
    "ROAD": "it mixes pairs of outputs, which the normal form does not",
}
"""Why a method is out of the normal form, where that is known."""

METHODS: tuple[Method, ...] = (lora.METHOD, adalora.METHOD, dora.METHOD, ia3.METHOD, vera.METHOD, oft.METHOD)


def method_of(raw: RawConfig) -> Method:
    """The one method that claims the config. Refuses CONFIG_INVALID or METHOD_UNSUPPORTED."""
    peft_type = raw.get("peft_type")
    if not isinstance(peft_type, str):
        raise Refusal(
            Code.CONFIG_INVALID, f"{CONFIG_FILE}: field peft_type: found {shown(peft_type)}; expected a string."
        )
    claims = [method for method in METHODS if method.peft_type == peft_type and method.claims(raw)]
    if len(claims) != 1:
        served = ", ".join(f"{method.name} ({method.peft_type})" for method in METHODS)
        why = f": {WHY_NOT[peft_type]}" if peft_type in WHY_NOT else ""
        raise Refusal(
            Code.METHOD_UNSUPPORTED,
            f"{CONFIG_FILE}: peft_type = {shown(peft_type)} is not served{why}. Scute serves {served}.",
        )
    return claims[0]

"""The methods that Scute serves, and which of them a config belongs to."""

from scute.admission.methods import dora, ia3, lora, oft, vera
from scute.admission.methods.method import Method, RawConfig
from scute.admission.tensors import CONFIG_FILE
from scute.errors import Code, Refusal

METHODS: tuple[Method, ...] = (lora.METHOD, dora.METHOD, ia3.METHOD, vera.METHOD, oft.METHOD)


def method_of(raw: RawConfig) -> Method:
    """The one method that claims the config. Refuses CONFIG_INVALID or METHOD_UNSUPPORTED."""
    peft_type = raw.get("peft_type")
    if not isinstance(peft_type, str):
        raise Refusal(Code.CONFIG_INVALID, f"{CONFIG_FILE}: field peft_type is {peft_type!r}; expected a string.")
    claims = [method for method in METHODS if method.peft_type == peft_type and method.claims(raw)]
    if len(claims) != 1:
        served = ", ".join(f"{method.name} ({method.peft_type})" for method in METHODS)
        raise Refusal(
            Code.METHOD_UNSUPPORTED,
            f"{CONFIG_FILE}: peft_type = {peft_type!r} is not served. Scute serves {served}.",
        )
    return claims[0]

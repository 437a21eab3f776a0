"""adapter_config.json: which fields are used, which have no effect on inference, and which are refused.

A field of the model is used. A field listed as inert changes nothing once the adapter is trained. A field listed
as refused must be off. Any other field must be off too: it was written by a PEFT that Scute does not know.
The lists follow PEFT 0.21.2 and the fields of older releases that are gone since.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PositiveInt,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import ErrorDetails

from scute.admission.patterns import Expressions, end_of_name, layer_index
from scute.admission.reasons import Reasons
from scute.admission.tensors import CONFIG_FILE
from scute.errors import Code, Refusal, shown


def _empty_if_null(value: Any) -> Any:
    return {} if value is None else value


def _compiled_as(build: Callable[[str], str]) -> BeforeValidator:
    """Check a regular expression, or every key of a dictionary; the context of the validation compiles them."""

    def check(value: Any, info: ValidationInfo) -> Any:
        expressions: Any = info.context
        for part in [value] if isinstance(value, str) else value if isinstance(value, dict) else ():
            try:
                expressions.compile(build(part))
            except Refusal:
                raise
            except ValueError as error:
                raise ValueError(f"{shown(part)}: {error}") from error
        return value

    return BeforeValidator(check)


Names = Annotated[str, _compiled_as(str)] | list[str]
Container = Annotated[str, _compiled_as(layer_index)]
RankPattern = Annotated[dict[str, PositiveInt], _compiled_as(end_of_name), BeforeValidator(_empty_if_null)]
AlphaPattern = Annotated[dict[str, float], _compiled_as(end_of_name), BeforeValidator(_empty_if_null)]


class AdapterConfig(BaseModel):
    """The fields that every supported method has, but for those in `absent`, which its PEFT class lacks."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    absent: ClassVar[frozenset[str]] = frozenset()
    inert: ClassVar[frozenset[str]] = frozenset(
        {
            "peft_type",
            "task_type",
            "auto_mapping",
            "base_model_name_or_path",
            "revision",
            "inference_mode",
            "peft_version",
            "runtime_config",
            "fan_in_fan_out",
        }
    )
    refused: ClassVar[dict[str, str]] = {
        "modules_to_save": "it replaces whole modules, which a batch cannot share; train with adapters only",
    }

    target_modules: Names
    exclude_modules: Names | None = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: Container | list[Container] | None = None

    _expressions: Expressions = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        self._expressions = context

    @property
    def expressions(self) -> Expressions:
        """What matches the regular expressions of the fields, within a time that they share."""
        return self._expressions

    @field_validator("layers_pattern")
    @classmethod
    def _layers_are_named(cls, value: Any, info: ValidationInfo) -> Any:
        if value and "layers_to_transform" in info.data and info.data["layers_to_transform"] is None:
            raise ValueError("it needs layers_to_transform; PEFT does not load it without")
        return value


Config = TypeVar("Config", bound=AdapterConfig)


def read_config(
    model: type[Config], raw: Mapping[str, Any], reasons: Reasons, remarks: Mapping[str, str] | None = None
) -> Config | None:
    """Check every field of the JSON and return the used ones; None if one of these has no meaning.

    remarks: what the file adds to the reason against a field.
    Refuses CONFIG_UNSUPPORTED_FIELD, CONFIG_UNKNOWN_FIELD or CONFIG_INVALID, naming the field.
    """
    used = model.model_fields.keys() - model.absent
    for name, value in raw.items():
        if name not in used and name not in model.inert and _is_on(name, value, model):
            reasons.add(_refusal_of(name, value, model, (remarks or {}).get(name, "")))
    fields = {name: value for name, value in raw.items() if name in used}
    try:
        return model.model_validate(fields, context=Expressions())
    except ValidationError as error:
        by_field: dict[str, list[ErrorDetails]] = {}
        for problem in error.errors():
            by_field.setdefault(str(problem["loc"][0]), []).append(problem)
        for name, problems in by_field.items():
            reasons.add(_invalid(name, fields.get(name), problems))
        return None


def _invalid(name: str, value: Any, problems: list[ErrorDetails]) -> Refusal:
    """What the checks of this module say; or else what was found, as deep as a check came, and what is allowed there.

    There are several problems where the value is none of several types.
    """
    for problem in problems:
        reason = problem.get("ctx", {}).get("error")
        if isinstance(reason, Refusal):
            return reason
        if reason is not None:
            return Refusal(Code.CONFIG_INVALID, f"{CONFIG_FILE}: field {name}: {reason}.")
    if problems[0]["type"] == "missing":
        return Refusal(Code.CONFIG_INVALID, f"{CONFIG_FILE}: field {name}: it is missing. Save the adapter with PEFT.")
    depth = max(len(problem["loc"]) for problem in problems)
    deepest = [problem for problem in problems if len(problem["loc"]) == depth]
    allowed = " or ".join(dict.fromkeys(problem["msg"].removeprefix("Input should be ") for problem in deepest))
    place = f" at {shown(deepest[0]['loc'][1])}" if isinstance(value, dict) and depth > 1 else ""
    return Refusal(
        Code.CONFIG_INVALID,
        f"{CONFIG_FILE}: field {name}: found {shown(deepest[0]['input'])}{place}; expected {allowed}.",
    )


def _is_on(name: str, value: Any, model: type[AdapterConfig]) -> bool:
    """Whether a field is set. PEFT makes a default object of an empty dict, so a known switch is on with {}."""
    return bool(value) or (isinstance(value, dict) and name in model.refused)


def _refusal_of(name: str, value: Any, model: type[AdapterConfig], remark: str) -> Refusal:
    if name in model.refused:
        reason = model.refused[name]
        sentence = f"{CONFIG_FILE}: field {name} = {shown(value)}: {reason}."
        return Refusal(Code.CONFIG_UNSUPPORTED_FIELD, f"{sentence} {remark}".rstrip())
    return Refusal(
        Code.CONFIG_UNKNOWN_FIELD,
        f"{CONFIG_FILE}: field {name} = {shown(value)} is unknown to Scute. A newer PEFT may have written it; "
        "unless it is off, the adapter cannot be served exactly.",
    )

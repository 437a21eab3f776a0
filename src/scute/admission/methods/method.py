"""What a method tells the compiler about itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from scute.admission.base import BaseModel
from scute.admission.config import AdapterConfig
from scute.admission.sites import Site
from scute.admission.tensors import Tensors
from scute.algebra.form import Member

RawConfig = Mapping[str, Any]
Build = Callable[[Any, Mapping[str, Site], BaseModel, Tensors], dict[str, Member]]


def _claim_all(_: RawConfig) -> bool:
    return True


def _accept(_: RawConfig, __: Tensors) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Method:
    """One PEFT method.

    name: as a user reads it. peft_type: the field of the JSON; claims: which configs of that type are this
    method's. config: the fields it uses. suffixes: its tensors behind a module's name; shared: its tensors that
    belong to no module. check: refuses a config or a file of a kind that cannot be read at all. build: takes
    the tensors of every site and returns the members by module name; a pure function but for the taking.
    """

    name: str
    peft_type: str
    config: type[AdapterConfig]
    suffixes: tuple[str, ...]
    build: Build
    shared: tuple[str, ...] = ()
    claims: Callable[[RawConfig], bool] = _claim_all
    check: Callable[[RawConfig, Tensors], None] = _accept

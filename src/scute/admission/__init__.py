"""Admission: PEFT adapter folders, checked and compiled to the normal form."""

from scute.admission.base import BaseModel, Projection
from scute.admission.compile import compile_adapter
from scute.admission.compiled.writer import compile_folder, write_folder

__all__ = ["BaseModel", "Projection", "compile_adapter", "compile_folder", "write_folder"]

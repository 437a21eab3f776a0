"""Without a GPU the Triton kernels run in Triton's interpreter, which must be chosen before triton is imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill fresh float buffers with NaN, so that reading an element nobody wrote shows in the result."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        buffer = empty(*args, **kwargs)
        return buffer.fill_(float("nan")) if buffer.is_floating_point() else buffer

    monkeypatch.setattr(torch, "empty", poisoned)

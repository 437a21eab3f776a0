"""Block sizes to try: some that were good elsewhere, and neighbours of a record that differ from it in one field."""

from collections.abc import Iterator, Mapping
from typing import Any

from scute.kernels.blocks import round_up

_REGISTERS = (64, 80, 96, 128, 168, 255)
# Fields that must be multiples of another.
_MULTIPLES = {"split_width": "inner", "columns": "block"}
# Several fields at once, as they were good on an H200 for Llama-3.1-8B in float16: no one of them may be good alone.
_KNOWN: Mapping[str, tuple[Mapping[str, int], ...]] = {
    "decode_blocks": (
        {"ranks": 4, "inner": 4096, "shrink_warps": 4},
        {"ranks": 2, "inner": 4096, "shrink_warps": 4},
        {"ranks": 1, "inner": 4096, "shrink_warps": 4},
        {"outer": 512, "rank": 8, "expand_warps": 4, "expand_registers": 128},
        {"outer": 512, "rank": 8, "expand_warps": 4, "expand_registers": 168},
        {"outer": 256, "rank": 8, "expand_warps": 2, "expand_registers": 128},
        {"shared_outer": 64, "shared_rank": 128, "expand_registers": 168},
        {"shared_outer": 128, "shared_rank": 64, "expand_registers": 168},
    ),
    "prefill_blocks": (
        {"outer": 128, "expand_warps": 4},
        {"outer": 128, "expand_warps": 8},
        {"outer": 256, "expand_warps": 4},
        {"outer": 256, "expand_warps": 8},
    ),
    "rotate_blocks": ({"columns": 128}, {"columns": 256}),
    "gemm_blocks": (
        {"outer": 64, "inner": 128, "warps": 4, "stages": 4},
        {"outer": 128, "inner": 64, "warps": 4, "stages": 4},
    ),
}


def known(rule: str, blocks: Any) -> Iterator[Any]:
    """`blocks` with what was good elsewhere."""
    for changes in _KNOWN.get(rule, ()):
        yield _align(blocks._replace(**changes))


def neighbours(blocks: Any) -> Iterator[Any]:
    """blocks: a named tuple of integers. Sizes are halved and doubled once and twice, the rest goes a step each way.

    What the device or the kernel cannot do is left out by the search, which compiles and checks everything.
    """
    for name, value in blocks._asdict().items():
        for other in _values(name, value):
            changed = blocks._replace(**{name: other})
            yield _align(changed)


def merge(blocks: Any, better: list[Any]) -> Any:
    """All changes of several neighbours in one record; of two to one field, the first."""
    changes: dict[str, int] = {}
    for other in better:
        for name, value in other._asdict().items():
            if value != getattr(blocks, name):
                changes.setdefault(name, value)
    return _align(blocks._replace(**changes))


def _values(name: str, value: int) -> Iterator[int]:
    if name.endswith("warps"):
        yield from (other for other in (value // 2, value * 2) if 1 <= other <= 16)
    elif name.endswith("stages"):
        yield from (other for other in (value - 1, value + 1) if 1 <= other <= 6)
    elif name.endswith("registers"):
        yield from (other for other in _REGISTERS if other != value)
    else:
        yield from (other for other in (value // 4, value // 2, value * 2, value * 4) if other >= 1)


def _align(blocks: Any) -> Any:
    for name, base in _MULTIPLES.items():
        if name in blocks._fields and base in blocks._fields:
            blocks = blocks._replace(**{name: round_up(getattr(blocks, name), getattr(blocks, base))})
    return blocks

"""Block sizes of the kernels by rule, from shapes and bytes alone; `scute.kernels.sizes` asks a table first."""

from typing import NamedTuple


class DecodeBlocks(NamedTuple):
    """Of the kernels for tiles of few rows.

    ranks, inner: ranks of a program of the shrink, columns of x at a time; shared_inner, shared_splits: columns at a
    time for a pair, and programs that share them out. outer, rank: columns of a program of the expand for a slot's
    tile, and ranks at a time; shared_outer, shared_rank: the same for a pair's tile. expand_registers: most a thread
    may have, so that enough programs are resident.
    """

    ranks: int
    inner: int
    shared_inner: int
    shared_splits: int
    shrink_warps: int
    outer: int
    rank: int
    shared_outer: int
    shared_rank: int
    expand_warps: int
    expand_registers: int


class PrefillBlocks(NamedTuple):
    """Of the kernels for tiles of many rows.

    rank, long_rank, shared_rank: ranks at a time, of a slot of at most `rank` ranks, of one of more, and of a pair.
    split_width: columns of x that one program of the shrink sums, `inner` at a time. outer, steps: columns of y at a
    time in the expand of a slot's tile, and how often; shared_outer, shared_steps: the same for a pair's tile, which
    keeps its products on the chip over all columns where the ranks are at most shared_kept. shared_shrink: ranks of a
    pair at a time in the shrink.
    """

    rank: int
    long_rank: int
    shared_rank: int
    inner: int
    split_width: int
    outer: int
    steps: int
    shrink_warps: int
    shrink_stages: int
    expand_warps: int
    expand_stages: int
    shared_outer: int
    shared_steps: int
    shared_kept: int
    shared_warps: int
    shared_stages: int
    shared_shrink: int


class RotateBlocks(NamedTuple):
    """columns: of a program, a multiple of all widths that matrix units know. block: at a time, for other widths."""

    block: int
    columns: int
    warps: int


class GemmBlocks(NamedTuple):
    """rows, outer, inner: rows and columns of y, and columns of x, at a time. splits: programs that share these out."""

    rows: int
    outer: int
    inner: int
    warps: int
    stages: int
    splits: int = 1


def decode_blocks(in_features: int, out_features: int, shared_rank: int, element_size: int) -> DecodeBlocks:
    """A program of the shrink takes all columns of x at once where registers hold them."""
    inner, ranks = power_of_2(in_features), 4
    if inner * element_size > 8192:  # sums of blocks stay in registers, so blocks are small
        inner, ranks = 4096 // element_size, 2
    shared_inner = max(64, min(power_of_2(in_features), 512 if element_size == 2 else 128))
    shared_outer = 32 if out_features < 16384 else 64
    shared_block = min(128, power_of_2(shared_rank))
    return DecodeBlocks(ranks, inner, shared_inner, 4, 4, 512, 8, shared_outer, shared_block, 4, 128)


def prefill_blocks(in_features: int, shared_rank: int, element_size: int) -> PrefillBlocks:
    """The splits depend on the columns of x alone, not on the number of rows, and so does the order of a row's sum."""
    inner = 128 // element_size
    width = round_up(-(-in_features // min(4, -(-in_features // 2048))), inner)
    block = 16 if shared_rank <= 16 else 32 if shared_rank <= 32 else 64
    # 32-bit products are unrolled, as no matrix unit makes them: there, few at a time.
    shared = (64, 8, 256, 4, 3, 128 if shared_rank > 64 else block) if element_size == 2 else (64, 1, 1, 4, 3, block)
    return PrefillBlocks(16, 64, block, inner, width, 256 // element_size, 8, 4, 3, 4, 3, *shared)


def rotate_blocks(in_features: int, rotation_width: int, element_size: int) -> RotateBlocks:  # noqa: ARG001
    """The same for all shapes; a table may tell them apart."""
    return RotateBlocks(64, 1024 // element_size, 4)


def gemm_blocks(tokens: int, out_features: int, element_size: int) -> GemmBlocks:
    """A decode GEMM is bound by reading its weights: blocks deep enough to have many of their bytes in flight."""
    rows = min(64, power_of_2(tokens))
    if out_features < 16384:
        return GemmBlocks(rows, 64, 256 // element_size, warps=4, stages=4)
    return GemmBlocks(rows, 128, 128 // element_size, warps=4, stages=4)


def power_of_2(value: int) -> int:
    """The smallest power of two that is at least `value`, and at least 16."""
    return max(16, 1 << (value - 1).bit_length())


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    return ceil_div(value, multiple) * multiple

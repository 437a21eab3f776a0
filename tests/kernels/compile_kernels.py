"""Compile every kernel for Hopper, without a GPU, and print what came out; a program, run by test_compile."""

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from scute.kernels.blocks import decode_blocks, gemm_blocks, prefill_blocks
from scute.kernels.decode_expand import expand_rows
from scute.kernels.decode_shrink import shrink_rows
from scute.kernels.decode_turn import turn_and_shrink
from scute.kernels.fused_gemm import fused_gemm
from scute.kernels.prefill_expand import expand_tiles
from scute.kernels.prefill_pairs import expand_pair_tiles, finish_pair_shrink
from scute.kernels.prefill_shrink import shrink_pair_tiles, shrink_tiles
from scute.kernels.rotate import copy_and_rotate, rotate

INDICES = (
    "table",
    "pair_rank",
    "items",
    "tiles",
    "shared_tiles",
    "rotated_tiles",
    "rows",
    "shared_rows",
    "slot_of_row",
    "arrivals",
)
FLOATS = ("h", "shared_h", "partial", "shared_partial", "vectors")
FACTORS = ("x", "y", "factors", "shared_a", "shared_b", "out", "inputs", "weight", "bias", "products")
VARYING = (
    "tokens",
    "shared_programs",
    "own_blocks",
    "shared_blocks",
    "blocks",
    "column_blocks",
    "tiles_end",
    "tiles_at_once",
    "slice_index",
    "items_launched",
    "items_end",
    "pairs_launched",
    "items_first",
    "turning",
    "pairs_end",
    "shared_end",
)  # never known to be multiples


def compile_kernel(kernel, dtype: str, constants: dict, warps: int, aligned: bool):
    """aligned: sizes and strides are multiples of 16."""
    types = dict.fromkeys(INDICES, "*i32") | dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(FACTORS, f"*{dtype}")
    slices = constants.get("SLICES", 1)
    types |= {"starts": ("i32",) * (slices + 1), "out_offsets": ("i32",) * slices}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    attributes = {}
    for position, name in enumerate(kernel.arg_names):
        if name in constants or name in VARYING or not (aligned or signature[name][0] == "*"):
            continue
        paths = (
            [(position, i) for i in range(len(signature[name]))]
            if isinstance(signature[name], tuple)
            else [(position,)]
        )
        attributes |= {path: [["tt.divisibility", 16]] for path in paths}
    position = kernel.arg_names.index
    source = ASTSource(kernel, signature, {(position(name),): value for name, value in constants.items()}, attributes)
    return triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": warps, "num_stages": 1})


def kernels(size: int, slices: int, aligned: bool):
    """(name, kernel, constants, warps) of every kernel for factors of `size` bytes an element."""
    few, many, gemm = (
        decode_blocks(4096, 6144, 256, size),
        prefill_blocks(4096, 256, size),
        gemm_blocks(64, 6144, size),
    )
    common = {"SLICES": slices, "PDL": True}
    both = common | {"SHARED": True}
    columns = both | {"ALIGNED": aligned}
    shrink = {"PDL": True, "SLICES": slices, "PARTS": 4, "SHARED_CHUNKS": 16, "SHARED_SPLITS": few.shared_splits}
    shrink |= {"SHARED_BLOCK_K": few.shared_inner}
    shrink |= {"HEIGHT": 16, "CHUNK": 16, "RANKS": few.ranks, "BLOCK_K": few.inner, "ONE_BLOCK": True}
    turn = {"BLOCK": 64, "COLUMNS": 256, "WIDEST": 32}
    yield "shrink rows", shrink_rows, shrink | {"BESIDE_GEMM": False}, few.shrink_warps
    yield (
        "turn rows",
        turn_and_shrink,
        shrink | turn | {"COPY_ROWS": 16, "TILES": 8},
        few.shrink_warps,
    )
    yield "expand rows", expand_rows, columns | {
        "HEIGHT": 16, "BLOCK_R": few.rank, "BLOCK_N": few.outer,
        "SHARED_BLOCK_R": few.shared_rank, "SHARED_BLOCK_N": few.shared_outer,
    }, few.expand_warps  # fmt: skip
    yield "shrink tiles", shrink_tiles, common | {
        "SPLIT_WIDTH": many.split_width, "CHUNK": 64, "HEIGHT": 32, "BLOCK_R": many.rank, "BLOCK_K": many.inner,
        "LONG_BLOCK_R": many.long_rank, "STAGES": many.shrink_stages,
    }, many.shrink_warps  # fmt: skip
    yield "shrink pair tiles", shrink_pair_tiles, {
        "PDL": True, "SPLIT_WIDTH": many.split_width, "CHUNK": 128, "HEIGHT": 64, "BLOCK_R": many.shared_shrink,
        "BLOCK_K": many.inner, "STAGES": many.shrink_stages,
    }, many.shrink_warps  # fmt: skip
    yield "expand tiles", expand_tiles, columns | {
        "SPLITS": 2, "HEIGHT": 32, "BLOCK_R": many.rank, "BLOCK_N": many.outer, "STEPS": many.steps,
        "LONG_BLOCK_R": many.long_rank, "LONG": True, "STAGES": many.expand_stages,
    }, many.expand_warps  # fmt: skip
    yield "finish pair shrink", finish_pair_shrink, common | {
        "SPLITS": 2, "PARTS": 1 if size == 4 else 2, "HEIGHT": 64, "BLOCK_R": many.shared_rank,
    }, 4  # fmt: skip
    for name, ranks in [("", 0), *([(", kept", 256)] if size == 2 else [])]:
        yield f"expand pair tiles{name}", expand_pair_tiles, common | {
            "PARTS": 1 if size == 4 else 2, "ALIGNED": aligned, "HEIGHT": 64, "RANKS": ranks,
            "BLOCK_R": many.shared_rank, "BLOCK_N": many.shared_outer, "STEPS": many.shared_steps,
            "STAGES": many.shared_stages,
        }, many.shared_warps  # fmt: skip
    for height in (16, 32):
        yield f"rotate {height}", rotate, {"PDL": True, "HEIGHT": height, **turn}, 4
        yield f"copy and rotate {height}", copy_and_rotate, {"PDL": True, "HEIGHT": height, "COPY_ROWS": 32, **turn}, 4
    yield "gemm", fused_gemm, common | {
        "HAS_BIAS": False, "ALIGNED": aligned, "STAGES": gemm.stages, "SPLITS": 2,
        "BLOCK_M": gemm.rows, "BLOCK_N": gemm.outer, "BLOCK_K": gemm.inner,
    }, gemm.warps  # fmt: skip


def main() -> None:
    for dtype, slices, aligned in [("bf16", 3, True), ("fp16", 2, True), ("fp32", 1, False)]:
        for name, kernel, constants, warps in kernels(4 if dtype == "fp32" else 2, slices, aligned):
            compiled = compile_kernel(kernel.function, dtype, constants, warps, aligned)
            assembly = compiled.asm["ptx"]
            report = {
                "name": f"{name} {dtype} {'aligned' if aligned else 'odd'}",
                "wide_loads": assembly.count("ld.global.v4") + assembly.count("cp.async.cg"),
                "wide_stores": assembly.count("st.global.v4"),
                "shared_memory": compiled.metadata.shared,
            }
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()

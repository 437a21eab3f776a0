"""Compile every kernel for Hopper, without a GPU, and print what came out; a program, run by test_compile."""

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from scute.kernels import lowrank, rotate, shared
from scute.kernels.blocks import EXPAND_STAGES, SHRINK_STAGES, WARPS, choose_blocks

INDICES = ("row_start", "table", "slice_starts", "rows", "tiles", "pair_rank", "out_offsets", "slot_of_row", "width")
FLOATS = ("partial", "scale", "shift", "d", "e")
FACTORS = ("x", "y", "a", "b", "rotation", "out")
VARYING = ("tokens", "stride_split", "stride_slice")  # depend on the batch: never specialised


def compile_kernel(kernel, dtype: str, blocks: dict[str, int], stages: int, model: str):
    """`model` "usual" has sizes that are multiples of 16, "odd" has sizes that are not, and one slice and split."""
    types = dict.fromkeys(INDICES, "*i32") | dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(FACTORS, f"*{dtype}")
    constants = dict(blocks)
    if model == "odd":
        constants |= {name: 1 for name in ("slices", "splits", "stride_partial") if name in kernel.arg_names}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    divisible = [name for name in kernel.arg_names if name not in constants and name not in VARYING]
    if model == "odd":
        divisible = []
    position = kernel.arg_names.index
    source = ASTSource(
        kernel,
        signature,
        {(position(name),): value for name, value in constants.items()},
        {(position(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    return triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": WARPS, "num_stages": stages})


def main() -> None:
    for dtype, height, model in [("bf16", 16, "usual"), ("fp16", 64, "usual"), ("fp32", 16, "odd")]:
        chosen = choose_blocks(height, 4096, 64, 4 if dtype == "fp32" else 2)
        shrink = {"HEIGHT": height, "BLOCK_R": chosen.rank, "BLOCK_K": chosen.inner}
        expand = {"HEIGHT": height, "BLOCK_R": chosen.rank, "BLOCK_N": chosen.outer}
        for name, kernel, blocks, stages in [
            ("low-rank shrink", lowrank._shrink, shrink, SHRINK_STAGES),
            ("low-rank expand", lowrank._expand, expand, EXPAND_STAGES),
            ("shared shrink", shared._shrink, shrink, SHRINK_STAGES),
            ("shared expand", shared._expand, expand, EXPAND_STAGES),
            ("rotate", rotate._rotate, {"HEIGHT": height, "BLOCK": 64}, 1),
        ]:
            compiled = compile_kernel(kernel, dtype, blocks, stages, model)
            assembly = compiled.asm["ptx"]
            report = {
                "name": f"{name} {dtype} {height} {model}",
                "wide_loads": assembly.count("ld.global.v4") + assembly.count("cp.async.cg"),
                "wide_stores": assembly.count("st.global.v4"),
                "shared_memory": compiled.metadata.shared,
            }
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()

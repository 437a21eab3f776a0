"""A trace is reduced to busy and idle time, gaps and families of kernels."""

import json

import pytest
from serving import traces
from serving.families import family_of


def event(name: str, ts: float, dur: float, cat: str = "kernel", tid: int = 7) -> dict[str, object]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": ts, "dur": dur}


def reduced(folder, *events) -> traces.DeviceTime:
    path = folder / "rank0.1.pt.trace.json"
    path.write_text(json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}))
    return traces.read(path)


def test_busy_is_the_union_and_idle_the_rest(tmp_path):
    found = reduced(
        tmp_path,
        event("expand_rows", 1340, 60),
        event("nvjet_tst_128x256", 1000, 100),
        event("shrink_rows", 1050, 30, tid=8),  # within the GEMM
        event("shrink_rows", 1090, 50, tid=8),  # 40 of them after it
        event("Memcpy DtoH (Device -> Pinned)", 1160, 20, cat="gpu_memcpy"),
        event("aten::mm", 0, 5000, cat="cpu_op"),
        event("cudaGraphLaunch", 0, 5000, cat="cuda_runtime"),
    )
    assert (found.source, found.events) == ("device", 5)
    assert (found.span, found.busy, found.idle) == pytest.approx((0.4, 0.22, 0.18))
    assert (found.gaps, found.gap_ms) == (1, pytest.approx(0.16)), "a gap of 20 µs is a short one"
    assert [(family.name, family.launches, family.ms) for family in found.families] == [
        ("GEMM", 1, 0.1),
        ("Scute shrink_rows", 2, 0.08),
        ("Scute expand_rows", 1, 0.06),
        ("copies", 1, 0.02),
    ]


def test_a_cpu_engine_s_outermost_operators(tmp_path):
    found = reduced(
        tmp_path,
        event("aten::addmm", 10, 20, cat="cpu_op"),
        event("aten::linear", 0, 40, cat="cpu_op"),
        event("aten::silu", 40, 10, cat="cpu_op"),
        event("execute_context_0(0)", 0, 50, cat="user_annotation"),
    )
    assert found.source == "cpu"
    assert [(family.name, family.launches, family.ms) for family in found.families] == [
        ("GEMM", 1, 0.04),
        ("aten::silu", 1, 0.01),
    ]


def test_the_smallest_families_are_one(tmp_path):
    found = reduced(tmp_path, *(event(f"kernel_{n}", 100 * n, 1 + n) for n in range(18)))
    assert len(found.families) == traces.FAMILIES + 1
    assert (found.families[-1].name, found.families[-1].launches) == ("other", 3)
    assert sum(family.ms for family in found.families) == pytest.approx(found.busy)


def test_a_trace_without_events(tmp_path):
    with pytest.raises(ValueError, match="no events"):
        reduced(tmp_path, event("cudaGraphLaunch", 0, 5, cat="cuda_runtime"))


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT", "GEMM"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm_relu>(Params)", "GEMM"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>(cublasLt::cublasSplitKParams<float>)", "GEMM"),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<int>>>()", "attention"),
        ("void vllm::reshape_and_cache_flash_kernel<unsigned short>(unsigned short const*)", "KV cache write"),
        ("triton_red_fused_attention_mm_rotate_0", "Inductor"),
        ("turn_and_shrink", "Scute turn_and_shrink"),
        ("rotate", "Scute rotate"),
        ("_lora_shrink_kernel", "vLLM lora_shrink"),
        ("_lora_expand_kernel", "vLLM lora_expand"),
        ("Memset (Device)", "copies"),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>",
            "sampling",
        ),
        ("void at::native::vectorized_elementwise_kernel<4, int>(int)", "at::native::vectorized_elementwise_kernel"),
    ],
)
def test_families(name, family):
    assert family_of(name).endswith(family[-40:])

#!/usr/bin/env bash
# Exactness on GPUs: kernels against their reference, then whole engines against PEFT; logs and results go to $1.
# With two GPUs the single-GPU runs share them, and tensor parallelism follows.
# usage: benchmarks/on_gpu.sh RESULT_FOLDER
set -u
out=$1
mkdir -p "$out"

run() { # NAME SECONDS COMMAND...: keep going, keep the log, say how it ended
    local name=$1 seconds=$2 start=$SECONDS
    shift 2
    timeout "$seconds" "$@" >"$out/$name.log" 2>&1
    echo "$name: exit $?, $((SECONDS - start)) s" >>"$out/summary.txt"
}

agreement() { # NAME SECONDS OPTIONS...
    local name=$1 seconds=$2
    shift 2
    run "$name" "$seconds" python3 benchmarks/agreement.py --work "/tmp/scute-$name" --out "$out/$name.json" "$@"
}

first() {
    export CUDA_VISIBLE_DEVICES=0 VLLM_CACHE_ROOT=/tmp/cache-0
    agreement tiny-llama 330 --model tiny-llama --stock
    run kernels 160 python3 -m pytest -q -p no:cacheprovider tests/kernels/test_gpu.py
}

second() {
    export CUDA_VISIBLE_DEVICES=$1 VLLM_CACHE_ROOT=/tmp/cache-1
    agreement llama-8b 250 --model llama-8b --layers "${LAYERS:-8}"
    agreement tiny-qwen2 200 --model tiny-qwen2
}

if [ "$(nvidia-smi -L | wc -l)" -ge 2 ]; then
    (first) &
    (second 1)
    wait
    agreement tiny-qwen2-tp2 180 --model tiny-qwen2 --tensor-parallel-size 2
    agreement llama-8b-tp2 180 --model llama-8b --layers 2 --tensor-parallel-size 2
else
    (first)
    (second 0)
fi
cat "$out/summary.txt"
for result in "$out"/*.json; do
    python3 benchmarks/agreement.py --show "$result"
done

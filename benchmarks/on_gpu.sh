#!/usr/bin/env bash
# Exactness on one GPU: kernels against their reference, then whole engines against PEFT. Results go to $1.
# usage: benchmarks/on_gpu.sh RESULT_FOLDER
set -u
out=$1
mkdir -p "$out"
run() { # NAME SECONDS COMMAND...: keep going, keep the log, say how it ended
    local name=$1 seconds=$2
    shift 2
    local start=$SECONDS
    timeout "$seconds" "$@" >"$out/$name.log" 2>&1
    echo "== $name: exit $?, $((SECONDS - start)) s"
    tail -n "${LINES_SHOWN:-20}" "$out/$name.log" | grep -v -e 'WARNING' -e 'it/s'
}
[ -n "${SKIP_KERNELS:-}" ] || run kernels 200 python3 -m pytest -q -x -p no:cacheprovider tests/kernels/test_gpu.py
run tiny-llama 240 python3 benchmarks/agreement.py --model tiny-llama --stock --out "$out/tiny-llama.json"
run tiny-qwen2 240 python3 benchmarks/agreement.py --model tiny-qwen2 --out "$out/tiny-qwen2.json"
run llama-8b 300 python3 benchmarks/agreement.py --model llama-8b --layers "${LAYERS:-4}" --out "$out/llama-8b.json"

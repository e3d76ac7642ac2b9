#!/usr/bin/env bash
# Everything that needs a CUDA device: tests, the kernel under compute-sanitizer where there is one, benchmarks.
# Usage: tools/test_gpu.sh PYTHON [FOLDER for the outputs]
set -uo pipefail
cd "$(dirname "$0")/.." || exit
python=${1:-python3} folder=${2:-out/gpu}
mkdir -p "$folder"
status=0

step() {  # step NAME SECONDS COMMAND...: run it within a time, keep its output, remember whether it failed
    local name=$1 seconds=$2
    shift 2
    echo "== $name"
    timeout "$seconds" "$@" 2>&1 | tee "$folder/$name.log" || { status=1; echo "== $name FAILED"; }
}

"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "no CUDA device here"; exit 1; }
step tests 240 "$python" -m pytest tests/gpu tests/unit/gpu -m gpu -q -p no:cacheprovider
if command -v compute-sanitizer >/dev/null; then
    step sanitizer 240 compute-sanitizer --tool memcheck --error-exitcode 9 --target-processes all \
        "$python" -m pytest tests/gpu/test_sanitized.py -m gpu -q -p no:cacheprovider
else
    echo "== no compute-sanitizer here: the kernel was not checked with it"
fi
for ranks in "" "--workers 2"; do  # one rank in the engine's process; two that share the device or have one each
    step "replay${ranks// /-}" 180 "$python" -c "from kvtiers.cli.main import main; main()" replay --workload code --requests 60 --device cuda \
        --blocks-per-chunk 3 --concurrency 8 --step-tokens 4096 $ranks
done
step gpu_copy 300 "$python" benchmarks/gpu_copy.py ${GPU_BENCH_ARGS:-}
step client_gpu 120 "$python" benchmarks/client_gpu.py ${GPU_BENCH_ARGS:-}
step region_start 120 "$python" benchmarks/region_start.py ${GPU_BENCH_ARGS:-}
if "$python" -c 'import kvtiers_transformers, transformers' 2>/dev/null; then
    step transformers 240 "$python" -m pytest integrations/transformers/tests/test_device.py -m gpu -q -p no:cacheprovider
    step load_or_recompute 300 "$python" integrations/transformers/benchmarks/load_or_recompute.py --device cuda
else
    echo "== no transformers here: what it has for a device was not run"
fi
exit $status

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Everything that only a GPU can tell, in one command and less than eight minutes:
#
#     bench/gpu_check.sh [FOLDER]
#
# build the package for the GPU's architecture, without network (into build/gpu_check/site; nothing
# is installed elsewhere) · each primitive against its emulation · the operators' tests on CUDA · the
# constants that the model assumes · the benches · compute-sanitizer on small shapes.
#
# Each part has a time limit of its own and what is left of the whole; one that fails does not stop
# the next. FOLDER (default build/gpu_check/results) gets gpu_check.json, constants.json,
# the benches' *_cuda.json and log.txt. Without a GPU every part is named as skipped and the exit code
# is 0; otherwise it is 1 when a part failed, or missed its goals.
#
# PYTHON names the interpreter (default python3): with torch for CUDA, pytest, pybind11, setuptools.
# GPU_CHECK_SECONDS is the time for all parts (default 465).

set -u
root=$(cd "$(dirname "$0")/.." && pwd)
results=${1:-$root/build/gpu_check/results}
work=$root/build/gpu_check
site=$work/site
python=${PYTHON:-python3}
mkdir -p "$results" "$work/run"
results=$(cd "$results" && pwd)
log=$results/log.txt
: > "$log"
SECONDS=0
whole=${GPU_CHECK_SECONDS:-465}
names=() states=() times=() notes=()

note() {  # NAME STATE SECONDS TEXT
  names+=("$1") states+=("$2") times+=("$3") notes+=("$4")
  printf '%-18s %-8s %4d s  %s\n' "$1" "$2" "$3" "$4"
}

part() {  # NAME LIMIT COMMAND...: run it in an empty folder; its output goes to the log
  local name=$1 limit=$2 start=$SECONDS left=$((whole - SECONDS)) code
  shift 2
  [ "$left" -lt "$limit" ] && limit=$left
  if [ "$limit" -lt 5 ]; then
    note "$name" skipped 0 "no time left"
    return
  fi
  printf '\n===== %s: %s\n' "$name" "$*" >> "$log"
  (cd "$work/run" && exec timeout --kill-after=5 "$limit" "$@") > "$work/part.txt" 2>&1
  code=$?
  cat "$work/part.txt" >> "$log"
  local last
  last=$(grep -v '^[[:space:]]*$' "$work/part.txt" | tail -n 1 | cut -c 1-100)
  case $code in
    0) note "$name" ok $((SECONDS - start)) "$last" ;;
    124 | 137) note "$name" timeout $((SECONDS - start)) "after $limit s: $last" ;;
    *) note "$name" failed $((SECONDS - start)) "exit code $code: $last" ;;
  esac
}

quoted() {  # TEXT as a JSON string
  local text=${1//\\/\\\\}
  text=${text//\"/\\\"}
  printf '"%s"' "$(printf '%s' "$text" | tr '\000-\037' ' ')"
}

report() {
  local i comma=
  {
    printf '{\n  "gpu": %s,\n  "seconds": %d,\n  "parts": [' "$(quoted "$gpu")" "$SECONDS"
    for i in "${!names[@]}"; do
      printf '%s\n    {"part": %s, "state": %s, "seconds": %d, "note": %s}' "$comma" \
        "$(quoted "${names[$i]}")" "$(quoted "${states[$i]}")" "${times[$i]}" \
        "$(quoted "${notes[$i]}")"
      comma=,
    done
    printf '\n  ]\n}\n'
  } > "$results/gpu_check.json"
  printf '%s: %d s\n' "$results/gpu_check.json" "$SECONDS"
}

parts=(build wrappers conformance kernels constants markov_loop rejection_sampler verify_attention
  prefix_scheduler sanitizer)
why=
query=$(nvidia-smi --query-gpu=name,compute_cap --format=csv,noheader 2> /dev/null | head -n 1)
gpu=${query%,*}
capability=${query##*, }
[ -z "$query" ] && why="no GPU: nvidia-smi is missing or names none"
[ -z "$why" ] && ! command -v "$python" > /dev/null && why="no interpreter $python (PYTHON)"
if [ -n "$why" ]; then
  gpu="none"
  for name in "${parts[@]}"; do note "$name" skipped 0 "$why"; done
  report
  exit 0
fi
case $capability in
  8.*) archs=80-real ;;
  9.*) archs=90a-real ;;
  10.*) archs=100a-real ;;
  *) archs=${capability%.*}0-real ;;
esac
echo "$gpu, compute capability $capability, built for $archs"
export DSPARK_ARCHS=$archs PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
export DSPARK_CUDA=${DSPARK_CUDA:-system}

rm -rf "$site"
part build 180 "$python" -m pip install --no-build-isolation --no-deps --no-index \
  --disable-pip-version-check --target "$site" "$root"
if [ "${states[0]}" != ok ]; then
  for name in "${parts[@]:1}"; do note "$name" skipped 0 "the build failed"; done
  tail -n 30 "$log"
  report
  exit 1
fi
export PYTHONPATH=$site

# Warnings of the libraries of this machine are not what is tested; -k cuda: on the device only.
tests=("$python" -m pytest -q -c "$root/pyproject.toml" -W default -p no:cacheprovider -k cuda)
"$python" -c 'import xdist' 2> /dev/null && tests+=(-n 4)
"$python" -c 'import pytest_timeout' 2> /dev/null && tests+=(--timeout 60)  # a kernel that hangs
nvcc=${CUDACXX:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
arch=${archs%-real}
library=$work/libdspark_conformance.so  # of the kernels that the emulation is compared with
part wrappers 90 "$nvcc" -shared -Xcompiler=-fPIC -std=c++17 -fmad=false --threads 4 \
  "-gencode=arch=compute_$arch,code=sm_$arch" -I "$root/csrc" -I "$root/csrc/include" \
  -I "$root/tests" -o "$library" "$root"/tests/simt/conformance*.cu "$root"/csrc/cuda/prim/*.cu \
  "$root/csrc/core/problems.cpp"
part conformance 60 env "DSPARK_CONFORMANCE=$library" "${tests[@]}" \
  "$root/tests/simt/test_conformance.py"
families=(confidence markov_loop paged_kv prefix_scheduler rejection_sampler verify_attention)
part kernels 120 "${tests[@]}" --maxfail=20 "${families[@]/#/$root/tests/}"
part constants 60 "$python" "$root/bench/constants/measure.py" --limit 55 \
  --save "$results/constants.json"
part markov_loop 150 "$python" "$root/bench/bench_markov_loop.py" --device cuda --limit 120 \
  --save "$results/markov_loop_cuda.json"
part rejection_sampler 90 "$python" "$root/bench/bench_rejection_sampler.py" --device cuda \
  --limit 60 --check --save "$results/rejection_sampler_cuda.json"
part verify_attention 90 "$python" "$root/bench/bench_verify_attention.py" --device cuda \
  --limit 60 --check --save "$results/verify_attention_cuda.json"
part prefix_scheduler 45 "$python" "$root/bench/bench_prefix_scheduler.py" --device cuda \
  --limit 30 --check --save "$results/prefix_scheduler_cuda.json"
if command -v compute-sanitizer > /dev/null; then
  for tool in memcheck racecheck synccheck; do
    part "$tool" 60 compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 10 \
      "$python" "$root/bench/lib/small_calls.py"
  done
else
  note sanitizer skipped 0 "compute-sanitizer is not installed"
fi
report
for state in "${states[@]}"; do
  if [ "$state" = failed ] || [ "$state" = timeout ]; then exit 1; fi
done
exit 0

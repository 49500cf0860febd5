#!/usr/bin/env bash
# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.

set -euo pipefail

usage() {
    cat <<'END'
The Triton kernels on a GPU: every kernel compiled and tested, then the benchmarks, in a given time.

    bash benchmarks/gpu_check.sh [options] OUTPUT

It needs this checkout and Python with torch, Triton, transformers and pytest; nothing is downloaded, and of the
checkout nothing is changed. Into the folder OUTPUT go a log of each part, the CSVs and pictures of the benchmarks, and
summary.txt: device, versions, tests that passed, and what each part came to. A part that runs out of its share of the
time is stopped and keeps the rows that it wrote; what a part leaves of its share goes to those after it. Take a new
folder for each run: models whose rows are there are not measured again.

Options:
  --wheels DIR      wheels that are installed, into a temporary folder, if transformers is missing or older than 5.18
  --budget SECONDS  for all parts together (default 460)
  --device DEVICE   cuda (the default), or cpu, where kernels are interpreted
  --peak-tflops N, --bandwidth N
                    of the device, in TFLOP/s (bf16) and TB/s, for the table `floor`; known for the H200
  --quick           small sizes; on a CPU, tiny ones and a few tests: a trial of this script
  --help            this text

PYTHON names the interpreter (default python3).

Exit code: 0 if all is well; 1 if the tests failed or did not end in time, or a benchmark ended with an error;
2 if nothing could be started.
END
}

fail() {
    echo "gpu_check.sh: $1" >&2
    exit 2
}

output="" wheels="" budget=460 device=cuda quick="" peaks=()
while (($#)); do
    case $1 in
        --help | -h) usage && exit 0 ;;
        --quick) quick=--quick ;;
        --wheels | --budget | --device)
            (($# > 1)) || fail "$1 needs a value"
            declare "${1#--}=$2"
            shift
            ;;
        --peak-tflops | --bandwidth)
            (($# > 1)) || fail "$1 needs a value"
            peaks+=("$1=$2")
            shift
            ;;
        -*) fail "$1 is not an option; see --help" ;;
        *)
            [[ -z $output ]] || fail "one output folder is expected, and both $output and $1 are given"
            output=$1
            ;;
    esac
    shift
done
[[ -n $output ]] || fail "an output folder is expected; see --help"
[[ $budget =~ ^[1-9][0-9]*$ ]] || fail "--budget $budget: a number of seconds is expected"
[[ $device == cuda || $device == cpu ]] || fail "--device $device: cuda or cpu is expected"
[[ -z $wheels || -d $wheels ]] || fail "--wheels $wheels: no such folder"

python=${PYTHON:-python3}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$output"
output=$(cd "$output" && pwd)
[[ -z $wheels ]] || wheels=$(cd "$wheels" && pwd)
cd "$root"
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
[[ $device == cpu ]] || unset TRITON_INTERPRET

# ------------------------------------------------------------------------------------------------------ the environment

transformers=$("$python" -c "
import importlib.metadata as metadata, importlib.util as util
print(metadata.version('transformers') if util.find_spec('transformers') else '0')")
IFS=. read -r major minor _ <<<"$transformers.0"
if ((major < 5 || (major == 5 && minor < 18))); then
    [[ -n $wheels ]] || fail "transformers is $transformers, and 5.18 or newer is needed: give a wheel by --wheels"
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl ||
        fail "the wheels in $wheels could not be installed"
    PYTHONPATH="$site:$PYTHONPATH"
fi

"$python" -c "
import sys
import pytest, torch, transformers
import hf_ttt
from hf_ttt.ttt_triton import triton
from benchmarks.common import environment
device = '$device'
if triton is None or (device == 'cuda' and not torch.cuda.is_available()):
    sys.exit('Triton is not installed' if triton is None else 'there is no CUDA device; see --device')
facts = {**environment(device), 'transformers': transformers.__version__, 'python': sys.version.split()[0]}
print(*(f'{name:16}{value}' for name, value in facts.items()), sep='\n')
" >"$output/summary.txt" || fail "this environment cannot run the kernels: see above"

# ------------------------------------------------------------------------------------------------------------ the parts

status=0
weights_left=0
parts=()

plan() { # NAME WEIGHT COMMAND…: a part, whose share of the time is its weight over those of the parts not yet run
    parts+=("$(printf '%q ' "$@")")
    weights_left=$((weights_left + $2))
}

run_part() { # NAME WEIGHT COMMAND…
    local name=$1 weight=$2 code=0 before=$SECONDS limit result
    shift 2
    limit=$(((budget - SECONDS) * weight / weights_left))
    limit=$((limit > 1 ? limit : 1))
    weights_left=$((weights_left - weight))
    echo "$name: at most $limit s"
    # an interrupt, to this process and not to pytest's workers too: then pytest still says what passed and what failed
    timeout --foreground --signal=INT --kill-after=20 "$limit" "$@" >"$output/$name.log" 2>&1 || code=$?
    local seconds=$((SECONDS - before))
    if [[ $code == 0 ]]; then
        result="done"
    elif [[ ($code == 124 || $code == 137) && $seconds -ge $limit ]]; then
        result="stopped"
    else
        result="failed with exit code $code"
    fi
    [[ $name == tests && $code != 0 || $result == failed* ]] && status=1
    printf '%-16s%s after %d s\n' "$name" "$result" "$seconds" | tee -a "$output/summary.txt"
    [[ $code == 0 ]] || tail -n 15 "$output/$name.log"
}

tests=(tests/test_ttt_triton*.py)
run=("$python" -m benchmarks run --device "$device" --output "$output" ${quick:+"$quick"})
models=("$python" -m benchmarks models --device "$device" --output "$output" --quick)
fast=(recurrent/torch parallel/torch recurrent/triton parallel/triton cublas sdpa)
if [[ $device == cpu && -n $quick ]]; then
    tests=(tests/test_ttt_triton.py -k "tiles or block")
    run+=(--variants variant2)
    models+=(--models lact-variant2 llama --size tiny --lengths 32 64 --steps 4 --repeats 2)
    fast=(recurrent/torch parallel/torch)
fi
if [[ $device == cpu ]]; then
    peaks=(--peak-tflops=0.1 --bandwidth=0.02 "${peaks[@]}") # of no machine: for a trial
fi
workers=()
if [[ $device == cuda ]] && "$python" -c "import xdist" 2>/dev/null; then
    cores=$(nproc)
    workers=(-n "$((cores < 8 ? cores : 8))")
fi

plan tests 150 "$python" -m pytest "${tests[@]}" -q --maxfail=20 -m "not slow" -p no:cacheprovider "${workers[@]}"
plan table2 70 "${run[@]}" --op table2 --backward --providers "${fast[@]}"
if [[ $device == cuda ]]; then # compilers take longer than all measurements: only what the others are compared with
    plan table2-compiled 60 "${run[@]}" --op table2 --variants baseline variant2 --backward \
        --providers compiled published-parallel
fi
plan floor 25 "${run[@]}" --op floor --providers parallel/torch parallel/triton cublas "${peaks[@]}"
plan width 35 "${run[@]}" --op width --providers "${fast[@]}"
plan length 30 "${run[@]}" --op length --providers "${fast[@]}"
plan models 55 "${models[@]}" --backends torch
if [[ $device == cuda ]]; then
    plan models-triton 30 "${models[@]}" --models lact-baseline lact-variant2 --backends triton
fi
plan plot 5 "$python" -m benchmarks plot --results "$output"
for part in "${parts[@]}"; do
    eval "run_part $part"
done

tests_line=$(grep -E '^(=+ )?[0-9]+ (passed|failed|skipped|error|deselected).* in [0-9.]+' "$output/tests.log" | tail -n 1 || true)
printf '%-16s%s\n' "pytest" "${tests_line:-no result}" "seconds" "$SECONDS of $budget" >>"$output/summary.txt"
echo && cat "$output/summary.txt"
exit "$status"

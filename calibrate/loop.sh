#!/usr/bin/env bash
# The whole method on a CPU: measure the steps of the torch engine, fit a profile, predict a plan,
# serve it, and judge the profile. Less than ten minutes on two cores.
#
#     calibrate/loop.sh OUT            needs simkv[gpu]; the result is OUT/validation.md
#
# Times are CPU time of the thread, because most machines are shared; CLOCK=wall uses the wall clock.
set -euo pipefail
out=${1:?usage: calibrate/loop.sh OUT}
PYTHON=${PYTHON:-python3}
by=(--device cpu --threads 1 --clock "${CLOCK:-cpu}")
export OMP_NUM_THREADS=1
pinned=()
if command -v taskset >/dev/null && [[ ${CLOCK:-cpu} == wall ]]; then pinned=(taskset -c 0); fi
simkv() { ${pinned[@]+"${pinned[@]}"} "$PYTHON" -m simkv.cli "$@"; }
mkdir -p "$out"
simkv gpu calibrate "$out" "${by[@]}" --small --model "${MODEL:-small}" \
    --budget "${MEASURE:-100s}" --repeats "${TIMES:-7}"
simkv gpu validate "$out/validation" --profile "$out" --device cpu --budget "${SERVE:-200s}" \
    --plan-only
simkv gpu validate "$out/validation" "${by[@]}" --budget "${LONGEST:-10m}" ${CASES:+--case $CASES}
cp "$out"/validation/*.{md,json,png} "$out" 2>/dev/null || true  # plots need a served trial
echo "$out/validation.md"

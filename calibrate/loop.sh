#!/usr/bin/env bash
# The whole loop on a CPU: measure what steps of the torch engine cost, fit a profile, predict nine
# cases, serve them, judge the profile by them. About five minutes on a core of one's own.
#
#     calibrate/loop.sh OUT            needs simkv[gpu]; OUT/validation.md is what comes of it
#
# Times are those of the thread, so that others may use the machine; CLOCK=wall takes the wall's.
set -euo pipefail
out=${1:?usage: calibrate/loop.sh OUT}
PYTHON=${PYTHON:-python3}
on=(--device cpu --small --model "${MODEL:-small}")
by=(--threads 1 --clock "${CLOCK:-cpu}")
repeats=${REPEATS:-3}
export OMP_NUM_THREADS=1
pinned=()
if command -v taskset >/dev/null && [[ ${CLOCK:-cpu} == wall ]]; then pinned=(taskset -c 0); fi
simkv() { "${pinned[@]}" "$PYTHON" -m simkv.cli "$@"; }
mkdir -p "$out"
simkv gpu calibrate "$out" "${on[@]}" "${by[@]}" --budget "${MEASURE:-30m}" --repeats "${TIMES:-7}"
simkv gpu validate "$out/validation" --profile "$out/profile.json" "${on[@]}" \
    --budget "$((25 * repeats))s" --repeats "$repeats" --plan-only
simkv gpu validate "$out/validation" --profile "$out/profile.json" "${on[@]}" "${by[@]}" \
    --budget 60m --repeats "$repeats" ${CASES:+--case $CASES}
cp "$out"/validation/*.{md,json,png} "$out" 2>/dev/null || true  # pictures need a served case
echo "$out/validation.md"

#!/usr/bin/env bash
# Commands for a machine with a GPU, from the root of the repository; see calibrate/README.md.
#
#     calibrate/on-gpu.sh smoke     OUT        test every part of the engine on this GPU
#     calibrate/on-gpu.sh calibrate OUT [IN]   measure kernels and steps, fit a profile
#     calibrate/on-gpu.sh validate  OUT IN     serve a plan and record the runs
#
# Each ends within ten minutes and leaves at most eight files in OUT. IN has the files of an earlier
# call that was cut off, or the plan (validate); it is only read. MODEL and KV_TOKENS replace the
# sizes that follow from the free memory. With REHEARSE=1 everything runs on a CPU.
began=$SECONDS
set -uo pipefail
what=${1:-} out=${2:-} in=${3:-}
[[ $what =~ ^(smoke|calibrate|validate)$ && -n $out ]] || { sed -n 2,10p "$0" >&2; exit 2; }
if [[ -n $in && ! -d $in ]]; then
    echo "on-gpu.sh: $in: not a directory" >&2
    exit 2
fi
mkdir -p "$out"
exec > >(tee -a "$out/log.txt") 2>&1
for packed in ${in:+"$in"/*.tar.gz} "$out"/*.tar.gz; do
    [[ -f $packed ]] && tar -C "$out" -xzf "$packed"
done
rm -f "$out"/*.tar.gz
[[ -n $in && -f $in/bench.json && ! -f $out/bench.json ]] && cp "$in/bench.json" "$out"
pack() {  # each directory becomes one file, and the logs of stages another
    local folder logs
    logs=("$out"/smoke-*.log)
    [[ -f ${logs[0]} ]] && mkdir -p "$out/logs" && mv "${logs[@]}" "$out/logs"
    for folder in "$out"/*/; do
        [[ -d $folder ]] || continue
        folder=${folder%/}
        tar -C "$out" -czf "$folder.tar.gz" "${folder##*/}" && rm -r "$folder"
    done
}
trap pack EXIT
trap 'exit 143' TERM INT
export PYTHONUNBUFFERED=1
PYTHON=${PYTHON:-python3}
# Packages that the machine lacks travel as wheels.
WHEELS=${WHEELS:-.whl}
if compgen -G "$WHEELS/*.whl" >/dev/null; then
    $PYTHON -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target /tmp/site "$WHEELS"/*.whl || exit
fi
export PYTHONPATH=".:/tmp/site${PYTHONPATH:+:$PYTHONPATH}"
most_s=${LIMIT:-570}
if [[ -n ${REHEARSE:-} ]]; then
    export OMP_NUM_THREADS=1  # on a busy machine, threads of one step wait for each other
    on=(--device cpu) small=(--small --repeats 3) model=${MODEL:-tiny} budget=${BUDGET:-20s}
else
    on=(--device cuda) small=() model=${MODEL:-} budget=${BUDGET:-}
fi
sizes=(${model:+--model "$model"} ${KV_TOKENS:+--kv-tokens "$KV_TOKENS"})
left() { echo $((most_s - (SECONDS - began))); }  # seconds
step() {  # name, most seconds, command...
    local name=$1 limit status
    limit=$(($2 < $(left) ? $2 : $(left)))
    shift 2
    if ((limit < 1)); then
        echo "== $name: SKIPPED, no time is left"
        return 1
    fi
    echo "== $name: starts after $((SECONDS - began)) s, limit $limit s"
    timeout --kill-after=10 "$limit" "$@"
    status=$?
    case $status in
        0) echo "== $name: done after $((SECONDS - began)) s" ;;
        124 | 137) echo "== $name: STOPPED at its limit of $limit s; finished parts are in $out" ;;
        *) echo "== $name: FAILED ($status) after $((SECONDS - began)) s" ;;
    esac
    return "$status"
}
simkv() { step "$1" "$2" "$PYTHON" -m simkv.cli gpu "${@:3}"; }
command -v nvidia-smi >/dev/null && nvidia-smi | head -15

case $what in
smoke)
    # shellcheck disable=SC2086
    step smoke "$(left)" "$PYTHON" calibrate/smoke.py "$out" ${REHEARSE:+--rehearse} \
        ${model:+--model "$model"} ${STAGES:+--stages $STAGES}
    ;;
calibrate)
    [[ -f $out/bench.json ]] || simkv bench 90 bench "${on[@]}" ${small[@]+"${small[@]}"} \
        ${sizes[@]+"${sizes[@]}"} --out "$out/bench.json" --warm-up 3
    # Six runs with a model in service follow the measurements.
    budget=${budget:-$(($(left) - 170))s}
    if [[ ${budget%s} -lt 5 ]]; then
        echo "== campaign: SKIPPED, $(left) s are left"
        exit 1
    fi
    simkv campaign "$(left)" calibrate "$out/campaign" "${on[@]}" ${small[@]+"${small[@]}"} \
        ${sizes[@]+"${sizes[@]}"} --budget "$budget"
    ;;
validate)
    mkdir -p "$out/validation"
    for plan in ${in:+"$in/plan" "$in"}; do
        [[ -f $plan/plan.json ]] || continue
        if [[ -d $out/validation/plan ]] && ! diff -r "$plan" "$out/validation/plan" >/dev/null; then
            echo "on-gpu.sh: $out has been started with another plan; use another OUT" >&2
            exit 2
        fi
        [[ -d $out/validation/plan ]] || cp -r "$plan" "$out/validation/plan"
        break
    done
    if [[ ! -f $out/validation/plan/plan.json ]]; then
        echo "on-gpu.sh: ${in:-IN}: contains no plan; write one with simkv gpu validate --plan-only" >&2
        exit 2
    fi
    simkv validate "$(left)" validate "$out/validation" "${on[@]}" \
        --budget "${BUDGET:-$(($(left) - 15))s}" --serve-only
    ;;
esac

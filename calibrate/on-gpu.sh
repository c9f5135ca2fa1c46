#!/usr/bin/env bash
# What to do on a machine with a GPU, from the root of the repository; see calibrate/README.md.
#
#     calibrate/on-gpu.sh smoke    OUT [FA3.so]   does each part work at all? four minutes
#     calibrate/on-gpu.sh first    OUT [FA3.so]   correctness, ceilings, both models calibrated
#     calibrate/on-gpu.sh validate OUT PLAN       serve what PLAN says and judge its profile by it
#
# The last two take less than ten minutes each. All that is found lies in OUT from the start, and in
# the end in a few files; what was done when time runs out is there, too. OUT may be one that was
# cut off: it goes on. With REHEARSE=1 all of it runs on a CPU with the tiny model.
began=$SECONDS
set -uo pipefail
what=${1:-} out=${2:-} given=${3:-}
[[ $what =~ ^(smoke|first|validate)$ && -n $out ]] || { sed -n 2,11p "$0" >&2; exit 2; }
if [[ $what == validate && ! -f $given/plan.json ]]; then
    echo "on-gpu.sh: $given/plan.json: no such plan; make one with simkv gpu validate --plan-only," \
        "commit it, and give its folder" >&2
    exit 2
fi
mkdir -p "$out"
exec > >(tee -a "$out/log.txt") 2>&1
for packed in "$out"/*.tar.gz; do  # of a run that was cut off
    [[ -f $packed ]] && tar -C "$out" -xzf "$packed" && rm "$packed"
done
pack() {  # folders become files, which travel more easily
    local folder
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
# Packages that the machine does not have travel as wheels.
WHEELS=${WHEELS:-.whl}
if compgen -G "$WHEELS/*.whl" >/dev/null; then
    $PYTHON -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target /tmp/site "$WHEELS"/*.whl || exit
fi
export PYTHONPATH=".:/tmp/site${PYTHONPATH:+:$PYTHONPATH}"
if [[ -n ${REHEARSE:-} ]]; then
    on=(--device cpu --small --repeats 3) big=tiny small=tiny workers=0 checks=tests/gpu/test_device.py
    most_s=${LIMIT:-600} check_s=300 spare_s=10 big_s=${BUDGET:-20} small_s=${BUDGET:-5}
    validate_s=${BUDGET:-60}
else
    on=(--device cuda) big=llama-3-8b small=qwen2.5-0.5b workers=8
    checks="tests/gpu/test_device.py tests/gpu/test_triton_kernels.py"
    most_s=580 check_s=150 spare_s=100 big_s=230 small_s=70 validate_s=520
fi
left() { echo $((most_s - (SECONDS - began))); }  # seconds until there must be an end
least() { echo $(($1 < $2 ? $1 : $2)); }
step() {  # name, seconds at most, command...
    local name=$1 limit status
    limit=$(least "$2" "$(left)")
    shift 2
    if ((limit < 1)); then
        echo "== $name: LEFT OUT, no time is left"
        return 1
    fi
    echo "== $name: begins after $((SECONDS - began)) s, has $limit s"
    timeout --kill-after=15 "$limit" "$@"
    status=$?
    case $status in
        0) echo "== $name: done after $((SECONDS - began)) s" ;;
        124 | 137) echo "== $name: STOPPED at its limit of $limit s; what it did lies in $out" ;;
        *) echo "== $name: FAILED ($status) after $((SECONDS - began)) s" ;;
    esac
    return "$status"
}
run() { step "$1" "$2" "$PYTHON" -m simkv.cli "${@:3}"; }
calibrate() {  # model, seconds to measure, options...
    local budget
    budget=$(least "$2" $(($(left) - spare_s)))  # three real runs come after it
    if ((budget < 5)); then
        echo "== calibrate-$1: LEFT OUT, $(left) s are left and $spare_s are needed for real runs"
        return 1
    fi
    run "calibrate-$1" "$(left)" gpu calibrate "$out/$1" "${on[@]}" --model "$1" \
        --budget "${budget}s" "${@:3}"
}
command -v nvidia-smi >/dev/null && nvidia-smi | head -15

case $what in
smoke)
    # shellcheck disable=SC2086
    "$PYTHON" calibrate/smoke.py "$out" ${REHEARSE:+--rehearse} ${given:+--fa3 "$given"} \
        ${STAGES:+--stages $STAGES}
    exit
    ;;
first)
    # shellcheck disable=SC2086
    step check $check_s "$PYTHON" -m pytest -vv -p no:cacheprovider -n $workers -rs --durations=5 \
        $checks
    run bench 90 gpu bench "${on[@]}" --model $big --out "$out/bench.json" --warm-up 3 \
        ${given:+--fa3 "$given"}
    spare_s=$((spare_s + small_s + 30)) calibrate $big $big_s
    [[ $small == "$big" ]] || spare_s=30 calibrate $small $small_s --warm-up 3
    ;;
validate)
    mkdir -p "$out/validation"
    if [[ -d $out/validation/plan ]] && ! diff -r "$given" "$out/validation/plan"; then
        echo "on-gpu.sh: $out has begun with another plan; give another OUT" >&2
        exit 2
    fi
    [[ -d $out/validation/plan ]] || cp -r "$given" "$out/validation/plan"
    run validate "$validate_s" gpu validate "$out/validation" "${on[@]}" --model $big \
        --profile "$out/validation/plan/profile.json" --budget ${validate_s}s
    status=$?
    cp "$out"/validation/*.{md,json,png} "$out" 2>/dev/null
    exit "$status"
    ;;
esac

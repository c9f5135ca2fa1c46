#!/usr/bin/env bash
# What to do on a machine with a GPU, from the root of the repository; see calibrate/README.md.
#
#     calibrate/on-gpu.sh first    OUT [FA3.so]   correctness, ceilings, both models calibrated
#     calibrate/on-gpu.sh validate OUT PROFILE    serve the scenarios, judge the profile
#
# Each is one command of less than ten minutes. What it finds comes to OUT in a few files; what was
# done when time runs out is there, too. With REHEARSE=1 all of it runs on a CPU with the tiny model
# in a minute or two.
set -uo pipefail
what=${1:-} out=${2:-}
[[ $what =~ ^(first|validate)$ && -n $out ]] || { sed -n 2,10p "$0" >&2; exit 2; }
shift 2
export PYTHONUNBUFFERED=1
PYTHON=${PYTHON:-python3}
# Packages that the machine does not have travel as wheels.
if compgen -G ".whl/*.whl" >/dev/null; then
    $PYTHON -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target /tmp/site .whl/*.whl || exit
fi
export PYTHONPATH=".:/tmp/site${PYTHONPATH:+:$PYTHONPATH}"
simkv() { $PYTHON -m simkv.cli "$@"; }
mkdir -p "$out"
work=$(mktemp -d)
began=$SECONDS
if [[ -n ${REHEARSE:-} ]]; then
    on=(--device cpu --small) big=tiny small=tiny workers=2
    most_s=150 check_s=60 big_s=20 small_s=5 validate_s=${BUDGET:-60}
else
    on=(--device cuda) big=llama-3-8b small=qwen2.5-0.5b workers=8
    most_s=580 check_s=150 big_s=230 small_s=70 validate_s=520
fi
left() { echo $((most_s - (SECONDS - began))); }  # seconds until there must be an end
least() { echo $(($1 < $2 ? $1 : $2)); }
step() {  # name, seconds at most, command...
    local name=$1 limit=$2 status=0
    shift 2
    echo "== $name ($((SECONDS - began)) s)"
    timeout "$limit" "$@" 2>&1 | tee "$out/$name.log"
    status=${PIPESTATUS[0]}
    echo "== $name took until $((SECONDS - began)) s"
    return "$status"
}
export -f simkv
export PYTHON
run() { step "$1" "$2" bash -c 'simkv "$@"' simkv "${@:3}"; }
keep() { tar -C "$work" -czf "$out/$1.tar.gz" "${@:2}"; }
nvidia-smi 2>/dev/null | tee "$out/nvidia-smi.txt" | head -15

case $what in
first)
    step check "$check_s" $PYTHON -m pytest -p no:cacheprovider -n $workers -rs --durations=5 \
        tests/lab/test_device.py tests/lab/test_kernels.py
    fa3=()
    [[ -n ${1:-} ]] && fa3=(--fa3 "$1")
    run bench 90 gpu bench "${on[@]}" --model $big --out "$out/bench.json" --warm-up 3 "${fa3[@]}"
    # Three real runs come after the budget, and the second model needs some time too.
    budget=$(least $big_s $(($(left) - small_s - 100)))
    run calibrate-$big "$(left)" calibrate "$work/$big" "${on[@]}" --model $big --budget "${budget}s"
    keep calibrate-$big "$big"
    if [[ $small != "$big" ]]; then
        budget=$(least $small_s $(($(left) - 30)))
        run calibrate-$small "$(left)" calibrate "$work/$small" "${on[@]}" --model $small \
            --budget "${budget}s" --warm-up 3
        keep calibrate-$small "$small"
    fi
    ;;
validate)
    run validate "$(left)" validate gpu "$work/validation" "${on[@]}" --model $big --profile "$1" \
        --budget ${validate_s}s
    status=$?
    cp "$work"/validation/*.{md,json,png} "$out" 2>/dev/null
    keep validation validation
    exit "$status"
    ;;
esac

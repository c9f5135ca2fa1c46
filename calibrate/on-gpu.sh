#!/usr/bin/env bash
# First things to do on a machine with a GPU, from the root of the repository:
#
#     calibrate/on-gpu.sh check    OUT        kernels and graphs against float64 (3 minutes)
#     calibrate/on-gpu.sh measure  OUT 6m     campaign and profile of Llama-3-8B (budget + 2 minutes)
#     calibrate/on-gpu.sh validate OUT PROFILE SCENARIO...    serve each twice, judge the profile
#
# Nothing is installed: simkv runs from the checkout with the machine's own python3 and torch.
set -uo pipefail
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
what=$1 out=$2
shift 2
simkv() { python3 -m simkv.cli "$@"; }
mkdir -p "$out"
nvidia-smi --query-gpu=name,driver_version,clocks.sm,temperature.gpu --format=csv | tee "$out/gpu.txt"
case $what in
check)
    python3 -m pytest -p no:cacheprovider tests/gpu/test_device.py tests/gpu/test_kernels.py \
        --durations=5 -rs 2>&1 | tee "$out/check.log"
    ;;
measure)
    simkv calibrate "$out/h200-llama-3-8b" --budget "${1:-6m}" 2>&1 | tee "$out/measure.log"
    ;;
validate)
    profile=$1
    shift
    for scenario in "$@"; do
        name=$(basename "$scenario" .yaml)
        simkv gpu serve "$scenario" --out "/tmp/$name-a" || exit
        simkv gpu serve "$scenario" --out "/tmp/$name-b" || exit
        simkv gpu validate "/tmp/$name-a" --again "/tmp/$name-b" --profile "$profile" \
            --out "$out/$name.json" 2>&1 | tee "$out/$name.log"
        tar -C /tmp -cf "$out/$name.tar" "$name-a" "$name-b"
    done
    ;;
*)
    echo "$0: check, measure or validate; found $what" >&2
    exit 2
    ;;
esac

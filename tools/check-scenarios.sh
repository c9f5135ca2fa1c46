#!/usr/bin/env bash
# usage: check-scenarios.sh [--trust] OUT SCENARIO...
# Run each scenario that has an `expect:` section and write OUT/<name>/ (figures and tables),
# OUT/<name>.xml (JUnit) and OUT/<name>.html (report). Continue after a failure.
# --trust: also run custom schedulers that scenarios name as files.
# Exit 0: all expectations are met; 1: an expectation failed; 2: a scenario could not be run, or none was found.
set -uo pipefail
trust=()
if [ "${1-}" = --trust ]; then
    trust=(--trust)
    shift
else
    # Import nothing from the current directory, which may be the checkout of a pull request.
    export PYTHONSAFEPATH=1
    unset PYTHONPATH
fi
if [ $# -lt 2 ]; then
    echo "usage: check-scenarios.sh [--trust] OUT SCENARIO..." >&2
    exit 2
fi
out=$1 worst=0 checked=0
shift
case $out in -*) out=./$out ;; esac
mkdir -p "$out" || exit 2
for file in "$@"; do
    case $file in -*) file=./$file ;; esac # a file name, not an option
    if [ -f "$file" ] && ! grep -q -- '^expect:' "$file"; then
        echo "$file: expects nothing, skipped"
        continue
    fi
    checked=$((checked + 1))
    name=${file#./} name=${name%.*} name=${name//\//-}
    case $name in '' | . | ..) name=scenario$name ;; esac # "...yaml" must not name the parent directory
    simkv run "$file" --out "$out/$name" --junit "$out/$name.xml" --no-plots "${trust[@]}"
    code=$?
    if [ "$code" -lt 2 ]; then
        simkv report "$out/$name" --out "$out/$name.html" --no-whatif "${trust[@]}" || code=2
    fi
    [ "$code" -gt "$worst" ] && worst=$code
done
if [ "$checked" = 0 ]; then
    echo "check-scenarios.sh: no scenario with an expect: section in $*" >&2
    exit 2
fi
exit "$worst"

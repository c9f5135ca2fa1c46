#!/usr/bin/env bash
# usage: check-scenarios.sh [--trust [--source PATH]] OUT SCENARIO...
# Run each scenario that has an `expect:` section and write OUT/<name>/ (figures and tables),
# OUT/<name>.xml (JUnit) and OUT/<name>.html (report). Continue after a failure.
# --trust: also run custom schedulers that scenarios name as files.
# --source: run an engine's own scheduler from this checkout or wheel. Also run the packaged incidents of
# the engine on it, compare them with its newest release, and write OUT/zoo.txt and OUT/zoo.xml (JUnit).
# Scenarios are optional then.
# Exit 0: all expectations are met; 1: an expectation or a served incident failed; 2: a scenario could not be run, or none was found.
set -uo pipefail
trust=() source=
if [ "${1-}" = --trust ]; then
    trust=(--trust)
    shift
    if [ "${1-}" = --source ] && [ $# -gt 1 ]; then
        source=$2
        trust+=(--source "$source")
        shift 2
    fi
else
    # Import nothing from the current directory, which may be the checkout of a pull request.
    export PYTHONSAFEPATH=1
    unset PYTHONPATH
fi
if [ $# -lt 1 ] || { [ $# -lt 2 ] && [ -z "$source" ]; } || [[ $1 == --* ]]; then
    echo "usage: check-scenarios.sh [--trust [--source PATH]] OUT SCENARIO..." >&2
    exit 2
fi
out=$1 worst=0 checked=0
shift
case $out in -*) out=./$out ;; esac
mkdir -p "$out" || exit 2
if [ -n "$source" ]; then
    checked=1
    simkv zoo --source "$source" --trust --junit "$out/zoo.xml" > "$out/zoo.txt"
    worst=$?
    cat "$out/zoo.txt"
fi
for file in "$@"; do
    case $file in -*) file=./$file ;; esac # a file name, not an option
    # A pattern without a match is no error if the incidents of a source were run.
    if [ -n "$source" ] && [ ! -e "$file" ]; then continue; fi
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
        simkv report "$out/$name" --out "$out/$name.html" --no-whatif "${trust[@]:0:1}" || code=2
    fi
    [ "$code" -gt "$worst" ] && worst=$code
done
if [ "$checked" = 0 ]; then
    echo "check-scenarios.sh: no scenario with an expect: section in $*" >&2
    exit 2
fi
exit "$worst"

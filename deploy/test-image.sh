#!/usr/bin/env bash
# Build the image of Dockerfile without a registry, start its default command in it, and send requests.
# Needs root, buildah and mmdebstrap (Debian packages). The base is a Debian system with Python; the steps run in a chroot
# with the network of the host. Not tested: the runtime of a container engine (isolation, read-only root, HEALTHCHECK).
# Run: deploy/test-image.sh [FOLDER], where FOLDER (default: a temporary one) keeps the base for the next time.
set -euo pipefail
cd "$(dirname "$0")/.."
for tool in buildah mmdebstrap curl; do
    command -v $tool >/dev/null || { echo "not run: $tool is missing"; exit 77; }
done
[ "$(id -u)" = 0 ] || { echo "not run: needs root"; exit 77; }
folder=${1:-$(mktemp -d)}
store=$(mktemp -d)
trap '[ -z "${server:-}" ] || pkill -TERM -g "$server" && sleep 2; build rm --all >/dev/null; rm -rf "$store"' EXIT
build() { buildah --root "$store/root" --runroot "$store/run" --storage-driver vfs "$@"; }
[ -e "$folder/base.tar" ] || mmdebstrap --quiet --variant=apt --include=python3,python3-venv,ca-certificates \
    bookworm "$folder/base.tar" $(ls /etc/apt/sources.list.d/*.sources /etc/apt/sources.list 2>/dev/null)
base=$(build from scratch)
build add "$base" "$folder/base.tar" / >/dev/null
build commit --quiet "$base" simkv-base >/dev/null
# The files of the host let pip reach a package index behind a proxy or a mirror.
mounts=(--volume /etc/ssl/certs:/etc/ssl/certs:ro)
[ -e /etc/pip.conf ] && mounts+=(--volume /etc/pip.conf:/etc/pip.conf:ro)
build build --quiet --isolation chroot --network host --format docker --build-arg BASE=localhost/simkv-base \
    "${mounts[@]}" --tag simkv . >/dev/null
box=$(build from localhost/simkv)
in_image() { build run --isolation chroot --network host "$box" -- "$@"; }
# The default command, as the image's configuration states it, with the user of the image.
mapfile -t command < <(build inspect --type image localhost/simkv | python3 -c '
import json, sys
config = json.load(sys.stdin)["Docker"]["config"]
assert config["User"] == "10001:10001" and config["Healthcheck"], config
print(*config["Entrypoint"], *config["Cmd"], sep="\n")')
set -m  # the server gets a process group of its own, which the trap ends
in_image "${command[@]}" --port 8971 --speed 20 >"$store/server.log" 2>&1 </dev/null &
server=$!
set +m
for _ in $(seq 100); do curl -sf localhost:8971/health >/dev/null && break; sleep 0.3; done
curl -sf localhost:8971/v1/completions -H 'content-type: application/json' \
    -d '{"prompt": "Once upon a time", "max_tokens": 8}'
echo
curl -sf localhost:8971/metrics | grep -c '^vllm:'
in_image simkv run --exit-zero mistralrs-forty | sed -n 1,3p
in_image sh -c 'test "$(id -u)" = 10001 && ! touch /opt/simkv/x 2>/dev/null && touch /data/x'
echo "the image serves, runs a scenario, and its user can write only to /data and /tmp"

"""Tests of files for deployment: the image's build context, and a real Prometheus server with
simkv's rules.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from ruamel.yaml import YAML

from tests.conftest import ROOT
from tests.serve.running_server import PATIENCE, scenario, serving, wait_until

RULES = ROOT / "deploy" / "prometheus"
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="Prometheus is not installed (Debian package prometheus)",
)


def load(path: Path) -> Any:
    return YAML(typ="safe").load(path.read_text(encoding="utf-8"))


def test_image_contains_what_the_wheel_needs() -> None:
    """The image copies all inputs of the build, and runs as a user other than root."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    context = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line[1:] for line in context if line.startswith("!")}
    copied = {
        name
        for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.M)
        for name in line.split()[:-1]
    }
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)
    assert re.search(r"^USER 10001:10001$", text, re.M)
    assert 'ENTRYPOINT ["simkv"]' in text
    assert json.loads(re.findall(r"^CMD (\[.*\])$", text, re.M)[-1])[0] == "serve"


def test_compose_file_scrapes_the_port_of_the_image() -> None:
    compose, config = load(ROOT / "compose.yaml"), load(RULES / "prometheus.yml")
    (target,) = config["scrape_configs"][0]["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert port in (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert f"{port}:{port}" in compose["services"][host]["ports"]
    assert compose["services"][host]["read_only"]


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[httpx.Client]:
    """Run Prometheus with our rules, scraping ``target`` four times a second."""
    text = (RULES / "prometheus.yml").read_text(encoding="utf-8")
    text = re.sub(r"(scrape|evaluation)_interval: 5s", r"\1_interval: 250ms", text)
    (folder / "prometheus.yml").write_text(text.replace("simkv:8000", target), encoding="utf-8")
    shutil.copy(RULES / "rules.yml", folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:

            def ready() -> bool:
                assert process.poll() is None, (folder / "log").read_text()
                try:
                    return client.get("/-/ready").status_code == 200
                except httpx.TransportError:
                    return False

            wait_until(ready)
            yield client
    finally:
        process.terminate()
        process.wait(PATIENCE)


@needs_prometheus
def test_rules_pass_their_unit_tests() -> None:
    for command in ("check rules rules.yml", "test rules rules_test.yml"):
        done = subprocess.run(
            ["promtool", *command.split()], cwd=RULES, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_prometheus_scrapes_the_server_and_evaluates_all_rules(tmp_path: Path) -> None:
    """Every recorded series has data, and each selector of an alert matches a metric."""
    groups = load(RULES / "rules.yml")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    read = {name for rule in rules for name in re.findall(r"vllm:\w+", rule["expr"])}
    with (
        serving(tmp_path, scenario(), "--speed", "20") as server,
        prometheus(tmp_path, server.url.removeprefix("http://")) as client,
    ):

        def query(expression: str) -> list[dict[str, Any]]:
            answer = client.get("/api/v1/query", params={"query": expression}).json()
            assert answer["status"] == "success", answer
            return list(answer["data"]["result"])

        def has_data(expression: str) -> bool:
            body = {"prompt": list(range(64)), "max_tokens": 4}
            assert server.post("/v1/completions", body).status_code == 200
            found = query(expression)
            return bool(found) and found[0]["value"][1] not in ("NaN", "0")

        for expression in [*sorted(recorded), 'up{job="simkv"}']:
            wait_until(lambda expression=expression: has_data(expression))
        assert {name for name in read if not query(name)} == set()
        states = client.get("/api/v1/rules").json()["data"]["groups"]
        assert all(rule["health"] == "ok" for group in states for rule in group["rules"])

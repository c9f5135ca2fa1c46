"""A server for tests: a real process, and how to talk to it."""

from __future__ import annotations

import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.conftest import ROOT

#: A step takes 10 ms, and a token of a prompt 0.1 ms more.
SCENARIO = """\
name: served
engine:
  name: vllm
  variant: "0.33.0"
  num_gpu_blocks: {blocks}
  max_model_len: {longest}
  max_num_seqs: 64
  enable_prefix_caching: true
profile: assumed-costs.json
"""
COSTS = ROOT / "scenarios" / "assumed-costs.json"


def scenario(blocks: int = 1000, longest: int = 4096) -> str:
    """The text of a scenario without a workload."""
    return SCENARIO.format(blocks=blocks, longest=longest)


@dataclass
class Served:
    """A server that runs: where, and its process."""

    url: str
    process: subprocess.Popen[str]
    folder: Path

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.url, timeout=60, verify=False, trust_env=False)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(path, **options)

    def end(self) -> str:
        """Tell it to end, as Kubernetes does; returns what it printed."""
        self.process.send_signal(signal.SIGTERM)
        out, _ = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, out
        return out


@contextmanager
def serving(folder: Path, text: str, *options: str, files: int | None = None) -> Iterator[Served]:
    """A server of this scenario's text, on a port of its own, that may open so many ``files``."""

    def limit() -> None:
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    path = folder / "served.yaml"
    path.write_text(text)
    shutil.copy(COSTS, folder)
    command = [sys.executable, "-m", "simkv", "serve", str(path), "--port", "0", *options]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        preexec_fn=limit,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"on (http://\S+)", line)
        assert found, line + process.stdout.read()
        yield Served(found[1], process, folder)
    finally:
        process.kill()
        process.communicate()

"""Run the unmodified ``vllm bench serve`` of vLLM's wheel against ``simkv serve``, without a GPU.

    pip download --no-deps --only-binary :all: vllm==0.33.0
    unzip -q vllm-0.33.0*.whl 'vllm/*.py' -d WHEEL
    pip install 'simkv[serve]' aiohttp regex tqdm
    python benchmarks/vllm_bench_client.py WHEEL SCENARIO [OPTIONS OF vllm bench serve]

Only the client of the benchmark runs. Modules of the engine and of missing packages that the client
imports are replaced by stubs that define any name; the client does not call them.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.abc
import importlib.machinery
import importlib.util
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

#: Modules that are loaded from the wheel; all other modules below ``vllm`` are stubs.
REAL = ("vllm.benchmarks", "vllm.exceptions")


class Hollow(type):
    """A stub class that can be called, subclassed and indexed, and that has any attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return hollow(name)

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __or__

    def __iter__(cls) -> Any:
        return iter(())


def hollow(name: str) -> Any:
    """Return a class with this name that does nothing."""
    return Hollow(name, (), {"__init__": _ignore})


def _ignore(*_: Any, **__: Any) -> None:
    """Accept any arguments and do nothing."""


class HollowModule(ModuleType):
    """A stub module that defines every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        return hollow(name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import finder that provides stubs for the engine's modules and for missing packages."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel

    def find_spec(self, name: str, *_: Any) -> Any:
        if name.startswith(REAL) or not name.startswith("vllm"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        module = HollowModule(spec.name)
        module.__path__ = [str(self.wheel.joinpath(*spec.name.split(".")))]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, because a stub has no code to run."""


class Absent(Finder):
    """Import finder that provides stubs for packages that the client imports but does not need."""

    PACKAGES = ("PIL", "datasets", "huggingface_hub", "pybase64", "soundfile", "transformers")

    def find_spec(self, name: str, *_: Any) -> Any:
        if name.partition(".")[0] not in self.PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)


class Words:
    """Tokenizer in which a token is three letters and a space, so that client and server count the
    same tokens.
    """

    LETTERS = "abcdefghijklmnopqrstuvwxyz"
    vocab_size = 26**3
    all_special_ids: tuple[int, ...] = ()
    max_chars_per_token = 4

    def decode(self, tokens: list[int], **_: Any) -> str:
        a = self.LETTERS
        return "".join(f"{a[t // 676 % 26]}{a[t // 26 % 26]}{a[t % 26]} " for t in tokens)

    def encode(self, text: str, **_: Any) -> list[int]:
        letters = [ord(letter) - 97 for letter in text]
        return [
            676 * letters[i] + 26 * letters[i + 1] + letters[i + 2]
            for i in range(0, len(text) - 3, 4)
        ]

    def num_special_tokens_to_add(self) -> int:
        return 0

    def __len__(self) -> int:
        return self.vocab_size


def client(wheel: Path) -> Any:
    """Return the module ``vllm.benchmarks.serve`` of an unpacked wheel."""
    sys.meta_path.insert(0, Finder(wheel))
    sys.meta_path.append(Absent(wheel))
    sys.path.append(str(wheel))
    tokenizers = importlib.import_module("vllm.tokenizers")
    tokenizers.__dict__["get_tokenizer"] = lambda *_, **__: Words()
    network = importlib.import_module("vllm.utils.network_utils")
    network.__dict__["join_host_port"] = lambda host, port: f"{host}:{port}"
    return importlib.import_module("vllm.benchmarks.serve")


def main() -> None:
    """Start the server, run the client against it, and stop the server."""
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    wheel, scenario, *options = sys.argv[1:]
    command = [sys.executable, "-m", "simkv", "serve", scenario, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        found = re.search(r":(\d+) at", server.stdout.readline())
        assert found, server.stdout.read()
        bench = client(Path(wheel))
        parser = argparse.ArgumentParser()
        bench.add_cli_args(parser)
        asyncio.run(bench.main_async(parser.parse_args(["--port", found[1], *options])))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


if __name__ == "__main__":
    main()

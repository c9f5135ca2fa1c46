"""Run a page of the documentation command by command, as its reader would.

A fenced block with a title is a file that the reader creates. A block ``console`` has commands
after ``$``, each with its output; a line ``...`` stands for any lines. Other blocks are not run.

    python -m tests.docs_walkthrough docs/tutorial.md   # updates the outputs; check them
"""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from difflib import SequenceMatcher
from io import StringIO
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r'title="([^"]+)"')
TUTORIAL = ROOT / "docs" / "tutorial.md"
ANY = "..."


@dataclass(frozen=True)
class Step:
    """A command of a page, its output in the page, and its real output."""

    command: str
    expected: list[str]
    got: list[str]

    @property
    def agrees(self) -> bool:
        """Return whether the output matches the page, where ``...`` stands for any lines."""
        parts = [
            r"(?:.*\n)*" if line == ANY else re.escape(line) + r"\n"
            for line in map(str.rstrip, self.expected)
        ]
        return bool(re.fullmatch("".join(parts), "".join(f"{line}\n" for line in self.got)))


def walk(page: str, folder: Path) -> Iterator[Step]:
    """Create the files of a page in ``folder`` and run its commands there in order.

    The folder also has the files of the tutorial, because readers come from the tutorial.
    """
    code = 0
    for _, info, text in [*FENCE.findall(TUTORIAL.read_text()), *FENCE.findall(page)]:
        if name := TITLE.search(info):
            (folder / name[1]).parent.mkdir(parents=True, exist_ok=True)
            (folder / name[1]).write_text(text)
    for language, _, text in FENCE.findall(page):
        for command, expected in commands(text) if language == "console" else ():
            if command == "echo $?":
                got = [str(code)]
            else:
                code, got = run(command, folder)
            yield Step(command, expected, got)


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of a block with their shown output; ``> `` continues a command."""
    command, shown = "", list[str]()
    for line in text.splitlines():
        if line.startswith("$ "):
            if command:
                yield command, shown
            command, shown = line[2:], []
        elif line.startswith("> ") and not shown:
            command += f"\n{line[2:]}"
        else:
            shown.append(line)
    yield command, shown


def run(command: str, folder: Path) -> tuple[int, list[str]]:
    """Return the exit code and output lines of a command; simkv runs in this process."""
    joined = command.replace("\\\n", " ")
    if joined.startswith("simkv ") and not re.search(r"[|><;&$*]", re.sub(r"'[^']*'", "", joined)):
        code, text = _simkv(shlex.split(joined), folder)
    else:
        bin_ = Path(sys.executable).parent
        here = {"PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        ran = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=os.environ | here,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        code, text = ran.returncode, ran.stdout
    return code, [line.rstrip() for line in text.splitlines()]


def _simkv(argv: list[str], folder: Path) -> tuple[int, str]:
    from simkv.cli import command_support, main

    out = StringIO()
    with (
        chdir(folder),
        # Lines of progress depend on the speed of the machine.
        mock.patch.object(command_support, "PROGRESS_LINE_S", math.inf),
        mock.patch.object(sys, "argv", argv),
        redirect_stdout(out),
        redirect_stderr(out),
    ):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return code, out.getvalue()


def updated(page: str, folder: Path) -> str:
    """Return the page with the present output of its commands, and with the same lines replaced by
    ``...``.
    """
    steps = iter(list(walk(page, folder)))

    def shown(fence: re.Match[str]) -> str:
        language, info, text = fence.groups()
        if language != "console":
            return fence[0]
        lines = []
        for command, expected in commands(text):
            lines += f"$ {command}".replace("\n", "\n> ").splitlines()
            lines += _cut(expected, next(steps).got)
        return f"```console{info}\n" + "".join(f"{line}\n" for line in lines) + "```"

    return FENCE.sub(shown, page)


def _cut(expected: list[str], got: list[str]) -> list[str]:
    """Return the output without the lines that the page omits: it retains the lines most similar to
    the lines shown before.
    """
    if ANY not in expected:
        return got
    kept, last = list[str](), 0
    for place, line in enumerate(expected):
        if line == ANY:
            kept.append(ANY)
            continue
        alike = {at: SequenceMatcher(None, line, got[at]).ratio() for at in range(last, len(got))}
        at = max(alike, key=lambda at: (alike[at], -at), default=None)
        if at is None or alike[at] < 0.4:
            continue
        if at > last and (place == 0 or kept[-1:] != [ANY]):
            kept.append(ANY)
        kept.append(got[at])
        last = at + 1
    return kept


def main() -> None:
    for page in map(Path, sys.argv[1:]):
        with tempfile.TemporaryDirectory() as folder:
            page.write_text(updated(page.read_text(), Path(folder)))


if __name__ == "__main__":
    main()

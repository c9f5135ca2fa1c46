"""Arrivals of requests from the access log of a web server in front of an engine.

The Common Log Format and its extensions (nginx, Apache, Envoy's default with ISO times) are read.
The log has no lengths in tokens, so the user must give the lengths.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import numpy as np

from simkv.core.atomic_files import make_folder, write_text
from simkv.core.errors import InputError
from simkv.core.input_files import read_text
from simkv.workload.length_distributions import RandomRange

#: Request line of a call that generates tokens, with the time before it.
_LINE = re.compile(
    r"\[(?P<time>[^\]]+)\]\s+\"POST (?P<path>\S*?/(?:completions|responses|messages|generate|"
    r"generate_stream))(?:\?\S*)? HTTP/[\d.]+\"\s*(?P<status>\d{3})?"
)
_FORMATS = ("%d/%b/%Y:%H:%M:%S %z", "%Y-%m-%dT%H:%M:%S.%f%z", "%Y-%m-%dT%H:%M:%S%z")
#: Number of lines at the beginning of the file in which such a call must occur.
HEAD_LINES = 200
#: Random seed for lengths and for times within a second.
SEED = 0


def is_access_log(path: Path) -> bool:
    """Return whether one of the first lines is a generation request with a time."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            return any(
                _LINE.search(line) for _, line in zip(range(HEAD_LINES), lines, strict=False)
            )
    except OSError:
        return False


def write_access_traffic(
    path: Path, target: Path, input_len: int, output_len: int, range_ratio: float
) -> int:
    """Write the accepted requests of an access log as a trace, and return their number.

    Lengths are sampled as in ``RandomRange``. Raises InputError if no line has a time.
    """
    times = np.array(sorted(_times(path)), dtype=np.float64)
    if not len(times):
        raise InputError(f"{path}: contains no completion request with a time and a success status")
    random = np.random.default_rng(SEED)
    if (times == np.floor(times)).all():
        times = np.sort(times + random.random(len(times)))
    prompts, outputs = (
        RandomRange(distribution="random", len=length, range_ratio=range_ratio).draw(
            random, len(times)
        )
        for length in (input_len, output_len)
    )
    rows = zip((times - times[0]).tolist(), prompts, outputs, strict=True)
    body = "".join(f"{at:.6f},{prompt},{output}\n" for at, prompt, output in rows)
    make_folder(target.parent)
    write_text(target, "arrival,prompt_tokens,output_tokens\n" + body)
    return len(times)


def _times(path: Path) -> Iterator[float]:
    """Yield the times of requests that were not rejected, in s since 1970."""
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        match = _LINE.search(line)
        if match and not (match["status"] or "200").startswith(("4", "5")):
            yield _seconds(match["time"], f"{path}:{number}")


def _seconds(text: str, place: str) -> float:
    for form in _FORMATS:
        try:
            return datetime.strptime(text.replace("Z", "+0000"), form).timestamp()
        except ValueError:
            continue
    raise InputError(f"{place}: cannot read the time {text!r}; expected 10/Oct/2026:13:55:36 +0000")

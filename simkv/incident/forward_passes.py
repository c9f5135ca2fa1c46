"""Forward-pass metrics: durations of single steps with the composition of their batches.

SGLang publishes one message per step (``--enable-forward-pass-metrics``, sgl-project/sglang#22789);
vllm-project/vllm#52061 proposes the same for vLLM. A file has one message per line, as JSON, or an
array of messages. The numbers of tokens are in the object ``scheduled_requests`` or, in messages of
Dynamo, at the top level.

``wall_time`` is in seconds. ``sum_prefill_tokens`` is the number of prompt tokens computed in the
step. ``sum_prefill_kv_tokens`` is the number of earlier tokens of these prompts.
``sum_decode_kv_tokens`` is the number of KV tokens that decodes read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from simkv.core.errors import InputError
from simkv.core.input_files import read_text
from simkv.costs.cost_profile import CostProfile
from simkv.incident.incident_calibration import build_profile_of_steps
from simkv.incident.logged_step_costs import MIN_STEP_LINES, fit_unit_costs

#: Columns of a step, by the field of the message.
COUNTS = {
    "num_prefill_requests": "prefill_seqs",
    "sum_prefill_tokens": "prefill_tokens",
    "sum_prefill_kv_tokens": "prefill_context",
    "num_decode_requests": "decode_seqs",
    "sum_decode_kv_tokens": "context",
}
#: Version of the messages whose fields are known.
VERSION = 1
#: Largest accepted number of tokens or seconds.
MOST = 1e15
#: Number of characters at the beginning of a file that are examined to recognize a message.
HEAD = 4096


def is_forward_passes(path: Path) -> bool:
    """Return whether a file contains forward-pass metrics."""
    try:
        with path.open(encoding="utf-8") as file:
            head = file.read(HEAD)
    except (OSError, UnicodeDecodeError):
        return False
    return '"wall_time"' in head and '"num_decode_requests"' in head


def read_forward_passes(path: Path) -> pd.DataFrame:
    """Return the steps in a file of forward-pass metrics, one row per message.

    Idle messages are skipped. Raises InputError with file, line and field if a message is invalid.
    """
    rows = [row for place, message in _messages(path) if (row := _step(place, message))]
    if not rows:
        raise InputError(
            f"{path}: contains no steps; expected forward-pass metrics of at least one step"
        )
    return pd.DataFrame(rows)


def _messages(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield each message with its position in the file as text."""
    text = read_text(path)
    if text.lstrip().startswith("["):
        try:
            found = json.loads(text)
        except ValueError as error:
            raise InputError(f"{path}: invalid JSON: {error}") from None
        yield from ((f"{path}: message {n}", one) for n, one in enumerate(found, start=1))
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                yield f"{path}:{number}", json.loads(line)
            except ValueError as error:
                raise InputError(f"{path}:{number}: invalid JSON: {error}") from None


def _step(place: str, message: Any) -> dict[str, float] | None:
    if not isinstance(message, dict):
        raise InputError(f"{place}: expected an object with wall_time and scheduled_requests")
    if message.get("version", VERSION) != VERSION:
        raise InputError(f"{place}: version: expected {VERSION}, got {message['version']}")
    inner = "scheduled_requests" in message
    counts = message["scheduled_requests"] if inner else message
    if not isinstance(counts, dict):
        raise InputError(f"{place}: scheduled_requests: expected an object")
    row = {"seconds": _number(place, message, "wall_time")}
    for name, column in COUNTS.items():
        row[column] = _number(place, counts, name, "scheduled_requests." if inner else "")
    idle = not (row["prefill_tokens"] or row["decode_seqs"])
    return None if idle or not row["seconds"] else row


def _number(place: str, values: dict[str, Any], name: str, prefix: str = "") -> float:
    value = values.get(name)
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if plain and value is not None and 0 <= value <= MOST:
        return float(value)
    got = f"got {value!r}" if name in values else "but it is missing"
    raise InputError(f"{place}: {prefix}{name}: expected a number from 0 to {MOST:g}, {got}")


def fit_forward_passes(
    steps: pd.DataFrame, *, engine: str, model: str = "unknown", gpu: str = "unknown"
) -> CostProfile:
    """Return a cost profile fitted to measured steps. One step in four is held out.

    ``engine``, ``model`` and ``gpu`` name the server in the profile. Raises InputError if there are
    fewer than ``MIN_STEP_LINES`` steps with prefills or decode-only steps.
    """
    prefills = steps["prefill_tokens"] > 0
    for kind, count in (
        ("with prefills", prefills.sum()),
        ("that only decode", (~prefills).sum()),
    ):
        if count < MIN_STEP_LINES:
            raise InputError(
                f"forward-pass metrics: expected at least {MIN_STEP_LINES} steps {kind}, got "
                f"{count}; record for a longer time under load"
            )
    prices, errors, kinds = fit_unit_costs(steps)
    profile = build_profile_of_steps(prices, errors, kinds, None, len(steps))
    decodes = steps[steps["decode_seqs"] > 0]
    means = decodes["context"] / decodes["decode_seqs"]
    chunks = steps.loc[prefills, "prefill_tokens"]
    return profile.model_copy(
        update={
            "name": f"{model} on {gpu}, from forward-pass metrics",
            "engine": engine,
            "model": model,
            "gpu": gpu,
            "range": {
                "prefill_tokens": (float(chunks.min()), float(chunks.max())),
                "decode_seqs": (1.0, float(np.max(decodes["decode_seqs"]))),
                "decode_mean": (float(means.min()), float(means.max())),
            },
            "source": [f"{len(steps)} steps of forward-pass metrics"],
        }
    )

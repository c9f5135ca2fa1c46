"""Write a run in the format of ``vllm bench serve --save-result --save-detailed``."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from simkv.core.outcome import Outcome
from simkv.incident.emit.log_dates import format_time
from simkv.sim.run_record import RequestRecord, RunRecord, emitting_rows


def bench_result(record: RunRecord) -> str:
    """Return the result as JSON. Start times use the client's clock."""
    lives = sorted(record.requests.values(), key=lambda one: (one.request.arrival, one.request.id))
    answered = [life.outcome is Outcome.FINISHED for life in lives]
    gaps = [_gaps(record, life) if done else [] for life, done in zip(lives, answered, strict=True)]
    result: dict[str, Any] = {
        "date": format_time(record.end, "%Y%m%d-%H%M%S"),
        "backend": "vllm",
        "num_prompts": len(lives),
        "request_rate": "inf",
        "duration": record.end,
        "completed": sum(answered),
        "input_lens": [life.request.prompt_tokens for life in lives],
        "output_lens": [
            life.tokens if done else 0 for life, done in zip(lives, answered, strict=True)
        ],
        "ttfts": [
            (life.first_token or 0.0) - life.request.arrival if done else 0.0
            for life, done in zip(lives, answered, strict=True)
        ],
        "itls": gaps,
        "start_times": [100.0 + life.request.arrival for life in lives],
        "generated_texts": ["" for _ in lives],
        "errors": ["" if done else "TimeoutError" for done in answered],
    }
    return json.dumps(result)


def _gaps(record: RunRecord, life: RequestRecord) -> list[float]:
    """Return the seconds between the tokens of a request."""
    ends = record.steps.end
    at = [ends[row] for first, last in emitting_rows(life) for row in range(first, last + 1)]
    return [later - earlier for earlier, later in pairwise(at)]

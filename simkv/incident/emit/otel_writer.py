"""Write a run's finished requests as vLLM's OpenTelemetry spans in OTLP JSON, one per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import md5
from typing import Any

from simkv.core.outcome import Outcome
from simkv.incident.emit.log_dates import RUN_EPOCH_S
from simkv.sim.run_record import RequestRecord, RunRecord

_RESOURCE = {
    "attributes": [
        {"key": "telemetry.sdk.language", "value": {"stringValue": "python"}},
        {"key": "service.name", "value": {"stringValue": "vllm"}},
    ]
}


def spans(record: RunRecord) -> Iterator[str]:
    """Yield one line per finished request, in order of completion."""
    done = [life for life in record.requests.values() if life.outcome is Outcome.FINISHED]
    for life in sorted(done, key=lambda one: (one.last_token or 0.0, one.request.id)):
        scopes = [{"scope": {"name": "vllm.llm_engine"}, "spans": [_span(record, life)]}]
        told = {"resourceSpans": [{"resource": _RESOURCE, "scopeSpans": scopes}]}
        yield json.dumps(told, separators=(",", ":"))


def request_name(number: int) -> str:
    """Return the id that vLLM's server gives to a client's request."""
    return f"cmpl-{md5(str(number).encode(), usedforsecurity=False).hexdigest()}-0"


def _span(record: RunRecord, life: RequestRecord) -> dict[str, Any]:
    """Return a span in the format of ``do_tracing`` in vllm/v1/engine/output_processor.py."""
    request = life.request
    begun = record.steps.start[life.segments[0].first]
    first, last = life.first_token or 0.0, life.last_token or 0.0
    name = request_name(request.id)
    attributes = {
        "gen_ai.latency.time_to_first_token": first - request.arrival,
        "gen_ai.latency.e2e": last - request.arrival,
        "gen_ai.latency.time_in_queue": begun - request.arrival,
        "gen_ai.usage.prompt_tokens": request.prompt_tokens,
        "gen_ai.usage.completion_tokens": life.tokens,
        "gen_ai.latency.time_in_model_prefill": first - begun,
        "gen_ai.latency.time_in_model_decode": last - first,
        "gen_ai.latency.time_in_model_inference": last - begun,
        "gen_ai.request.id": name,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.n": 1,
    }
    return {
        "traceId": md5(name.encode(), usedforsecurity=False).hexdigest(),
        "spanId": md5(name.encode(), usedforsecurity=False).hexdigest()[:16],
        "name": "llm_request",
        "kind": 2,
        "startTimeUnixNano": str(round((RUN_EPOCH_S + request.arrival) * 1e9)),
        "endTimeUnixNano": str(round((RUN_EPOCH_S + last) * 1e9)),
        "attributes": [{"key": key, "value": _value(value)} for key, value in attributes.items()],
        "status": {},
    }


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    return {"intValue": str(value)} if isinstance(value, int) else {"doubleValue": value}

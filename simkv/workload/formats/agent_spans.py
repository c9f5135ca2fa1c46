"""Calls of agents in OpenTelemetry spans with the conventions for generative AI.

``gen_ai.operation.name`` is the kind of a span. "chat", "text_completion" and "generate_content"
are calls of a model, with ``gen_ai.usage.input_tokens`` and ``output_tokens``. "invoke_agent" and
"invoke_workflow" are agents, and "execute_tool" is the run of a tool
(github.com/open-telemetry/semantic-conventions, docs/gen-ai/gen-ai-spans.md and
gen-ai-agent-spans.md). A call belongs to the nearest agent among the ancestors of its span. An
agent with another agent among its ancestors is a sub-agent of that agent. All calls that do not
belong to a sub-agent belong to one main agent, which is identified by ``gen_ai.conversation.id``
and can therefore continue in later traces; without this attribute, it is identified by the trace.

The module ``recorded_dependencies`` infers for which other calls a call waits. The time in which
tools of its agent ran before the call is tool time. A prompt repeats the prompt and the answer of
the agent's previous call; if it is shorter than these, it shares no tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from simkv.workload.formats.recorded_dependencies import (
    RecordedCall,
    grow_prompts,
    infer_waits,
    rows_from_calls,
)
from simkv.workload.formats.telemetry_spans import Span, read_number
from simkv.workload.json_records import make_column
from simkv.workload.request_columns import RequestRows
from simkv.workload.trace_source import TraceSource

_CALLS = ("chat", "text_completion", "generate_content")
_AGENTS = ("invoke_agent", "invoke_workflow")
_TOOLS = ("execute_tool",)
_CONVERSATION = "gen_ai.conversation.id"


def is_call(span: Span) -> bool:
    """Return whether a span is a call of a model."""
    return _operation(span) in _CALLS


def _operation(span: Span) -> str:
    return str(span.attributes.get("gen_ai.operation.name"))


def rows_from_agents(source: TraceSource, spans: Sequence[Span]) -> RequestRows:
    """Return the model calls among the spans, in order of start times.

    Failed and invalid calls are counted in ``source``.
    """
    index = {(span.trace, span.id): span for span in spans if span.id}
    parents: dict[str, str] = {}
    tools: dict[str, list[tuple[float, float]]] = {}
    calls: list[RecordedCall] = []
    for span in sorted(spans, key=lambda span: (span.start != span.start, span.start)):
        if is_call(span):
            source.tally.rows += 1
            if "error.type" in span.attributes:
                source.failed("with an error", np.array([True]), [span.line])
                continue
            try:
                calls.append(_call(span, _agent(span, index, parents), source.tally.rows - 1))
            except ValueError as error:
                column, _, what = str(error).partition(": ")
                source.bad(span.line, column, what)
        elif _operation(span) in _TOOLS:
            tools.setdefault(_agent(span, index, parents), []).append((span.start, span.end))
    calls = _answered(source, calls)
    first = min((call.start for call in calls), default=0.0)
    waits = infer_waits(calls, parents)
    for row, (call, wait) in enumerate(zip(calls, waits, strict=True)):
        used = _time_within(tools.get(call.agent, ()), call.start - wait.delay, call.start)
        calls[row] = replace(call, start=call.start - first, end=call.end - first, tool_time=used)
    return rows_from_calls(source, calls, waits, grow_prompts(calls))


def _call(span: Span, agent: str, number: int) -> RecordedCall:
    """Return the model call of a span. Raises ValueError if a field is invalid."""
    # The message is ``column: reason``.
    prompt, output = (
        int(read_number(span.attributes, f"gen_ai.usage.{name}_tokens"))
        for name in ("input", "output")
    )
    if not span.end >= span.start:
        what = "missing" if span.end != span.end else f"found {span.end:.6f}"
        raise ValueError(
            f"end: should be a time in 1970 or later, and not before the start; {what}"
        )
    return RecordedCall(agent, span.start, span.end, prompt, output, number, span.line)


def _answered(source: TraceSource, calls: list[RecordedCall]) -> list[RecordedCall]:
    """Return the calls that have a prompt and an answer. Count the others as failed."""
    for name in ("output", "prompt"):
        empty = make_column((getattr(call, f"{name}_tokens") == 0 for call in calls), bool)
        source.failed(f"with no {name} token", empty, [call.line for call in calls])
        calls = [call for call, none in zip(calls, empty, strict=True) if not none]
    return calls


def _agent(span: Span, index: Mapping[tuple[str, str], Span], parents: dict[str, str]) -> str:
    """Return the name of the agent of a span."""
    # A sub-agent is added to ``parents``.
    conversation = span.attributes.get(_CONVERSATION)
    agents: list[Span] = []
    seen = {span.id}
    above = index.get((span.trace, span.parent))
    while above is not None and above.id not in seen:
        seen.add(above.id)
        conversation = above.attributes.get(_CONVERSATION) or conversation
        if _operation(above) in _AGENTS:
            agents.append(above)
        above = index.get((above.trace, above.parent))
    top = f"conversation {conversation}" if conversation else f"trace {span.trace}"
    names = [f"{top} agent {agent.id}" for agent in agents[:-1]] + [top]
    parents.update(pairwise(names))
    return names[0]


def _time_within(spans: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Return the time (s) from ``start`` to ``end`` that any of the spans covers."""
    total, since = 0.0, start
    for low, high in sorted(spans):
        low, high = max(low, since), min(high, end)
        if high > low:
            total += high - low
            since = high
    return total

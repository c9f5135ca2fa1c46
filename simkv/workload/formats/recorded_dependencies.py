"""Dependencies between recorded calls of agents, inferred from their starts and ends.

A record of agents has the time of each call, but often not the reason why a call started.
Therefore, a call is assumed to wait for all calls that had ended when it started and whose answers
its agent may have received: calls of the agent itself and of its sub-agents and, for a sub-agent,
also calls of its parent. Calls that ran in parallel thus also run in parallel in the simulation,
and a call does not wait for a sub-agent that was still working when the call started. The delay is
the recorded time between the last end of these calls and the start of the call. AISimulate also
uses this time as the delay (github.com/ai-dynamo/aisimulate, crates/core/src/replay/README.md);
aiperf calls the rule a join of spawned branches (github.com/ai-dynamo/aiperf,
docs/tutorials/weka-trace.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from simkv.workload.formats.growing_turns import Piece, extend_context
from simkv.workload.json_records import make_column
from simkv.workload.request_columns import PromptPieces, RequestRows, make_tuples
from simkv.workload.trace_source import TraceSource

#: A call that ends at most this long (s) after the start of another call counts as ended then.
EPSILON_S = 1e-6


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A recorded call of a model.

    - ``start``, ``end``: times in seconds.
    - ``number``: number of its row.
    - ``tool_time``: seconds in which tools ran before its start.
    """

    # The tool time begins after the end of the calls that it waited for.

    agent: str
    start: float
    end: float
    prompt_tokens: int
    output_tokens: int
    number: int
    line: int
    tool_time: float = 0.0


class CallWait(NamedTuple):
    """Indices of the calls that a call waits for, and the delay (s) after the last of them."""

    before: tuple[int, ...]
    delay: float


def infer_waits(calls: Sequence[RecordedCall], parents: Mapping[str, str]) -> list[CallWait]:
    """Return the calls for which each call waits.

    ``calls`` is in order of start times. ``parents`` maps sub-agents to the agents that start them.
    """
    # If a call waits for two others, of which one waits for the other, only the later one is
    # listed.
    waits: list[CallWait] = []
    running: list[tuple[float, int]] = []
    ended: dict[str, list[int]] = {}
    first: dict[str, float] = {}

    def covers(later: int, earlier: int) -> bool:
        """Return whether an ended call waits for an earlier call, possibly through other calls."""
        one, other = calls[later], calls[earlier]
        if one.agent in _ancestors(other.agent, parents):
            return other.end <= one.start + EPSILON_S
        parent = other.agent in _ancestors(one.agent, parents)
        return parent and other.end <= first[one.agent] + EPSILON_S

    for position, call in enumerate(calls):
        first.setdefault(call.agent, call.start)
        while running and running[0][0] <= call.start + EPSILON_S:
            _, done = heappop(running)
            for agent in _ancestors(calls[done].agent, parents):
                latest = ended.setdefault(agent, [])
                latest[:] = [one for one in latest if not covers(done, one)]
                latest.append(done)
        agents = _ancestors(call.agent, parents)
        before = tuple(next((ended[agent] for agent in agents if ended.get(agent)), ()))
        end = max((calls[one].end for one in before), default=call.start)
        waits.append(CallWait(before, max(0.0, call.start - end)))
        heappush(running, (call.end, position))
    return waits


def _ancestors(agent: str, parents: Mapping[str, str]) -> list[str]:
    """Return an agent, its parent, the parent of the parent, and so on."""
    found = [agent]
    while (parent := parents.get(found[-1])) is not None and parent not in found:
        found.append(parent)
    return found


def grow_prompts(calls: Sequence[RecordedCall]) -> PromptPieces:
    """Return the prompts of calls for which only the lengths are known.

    A prompt repeats the prompt and the answer of the agent's previous call. A shorter prompt shares
    no tokens. ``calls`` is in order of start times.
    """
    # The previous call is the last one that had ended. A prompt is shorter after a compaction.
    own: dict[str, list[int]] = {}
    contexts: list[list[Piece]] = []
    repeated: list[list[Piece]] = []
    for position, call in enumerate(calls):
        before = own.setdefault(call.agent, [])
        ended = (one for one in reversed(before) if calls[one].end <= call.start + EPSILON_S)
        last = next(ended, None)
        size = 0 if last is None else calls[last].prompt_tokens + calls[last].output_tokens
        if last is None or size > call.prompt_tokens:
            last, size = None, 0
        repeated.append([] if last is None else contexts[last])
        new = call.prompt_tokens - size
        contexts.append(extend_context(repeated[-1], call.number, new, call.output_tokens))
        before.append(position)
    return PromptPieces.of(repeated)


def rows_from_calls(
    source: TraceSource,
    calls: Sequence[RecordedCall],
    waits: Sequence[CallWait],
    pieces: PromptPieces | None,
) -> RequestRows:
    """Return the calls as rows. ``pieces`` contains the shared beginnings of their prompts."""
    delays = make_column((w.delay if w.before else np.nan for w in waits), np.float64)
    tools = np.minimum(delays, make_column((call.tool_time for call in calls), np.float64))
    numbers = [call.number for call in calls]
    return RequestRows(
        arrival=make_column((call.start for call in calls), np.float64),
        prompt_tokens=make_column((call.prompt_tokens for call in calls), np.int64),
        output_tokens=make_column((call.output_tokens for call in calls), np.int64),
        session=make_column((source.sessions.number(call.agent) for call in calls), np.int64),
        think_time=delays - tools,
        tool_time=tools,
        waits_for=make_tuples([tuple(numbers[one] for one in w.before) for w in waits]),
        number=make_column(numbers, np.int64),
        pieces=pieces,
    )

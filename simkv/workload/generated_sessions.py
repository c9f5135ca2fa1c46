"""Generated sessions: conversations and agents, whose requests wait for earlier answers.

A session is a graph of requests. Each turn waits for the answer to the previous turn, or for the
sub-agents that the previous turn started.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Self

import numpy as np
from pydantic import Field, model_validator

from simkv.core.request import Request, Segment
from simkv.workload.clients import Dependency
from simkv.workload.generated_requests import ArrivalProcess, SharedPrefixes
from simkv.workload.length_distributions import (
    LengthDistribution,
    LengthField,
    TimeDistribution,
    sample_lengths,
    sample_times,
)
from simkv.workload.workload_base import (
    MAX_REQUEST_COUNT,
    MAX_TOKEN_COUNT,
    Count,
    Seed,
    StrictModel,
    Tokens,
    make_random_stream,
)

#: Maximum number of turns in a session; each turn repeats all previous turns.
MAX_TURNS = 1000


@dataclass(frozen=True, slots=True)
class SessionCall:
    """A request of a session, before it has a number and a time. Calls are given by index in the
    session.

    - ``new``: number of new prompt tokens. ``output``: number of output tokens.
    - ``before``: calls that this call waits for.
    - ``history``: calls whose new prompt tokens (True) or answers (False) the prompt repeats, in
      order.
    - ``rewritten``: number of tokens of a compacted context.
    - ``agent``: first call of the sub-agent; -1 for the main agent.
    - ``first_wins``: whether the call waits only for the first answer.
    """

    new: int
    output: int
    before: tuple[int, ...] = ()
    history: tuple[tuple[int, bool], ...] = field(default=(), repr=False)
    rewritten: int = 0
    agent: int = -1
    first_wins: bool = False


class SubAgents(StrictModel):
    """Sub-agents that a turn starts. The next turn waits for them and repeats their last answers.

    Each sub-agent has its own context, which begins with ``prefix_tokens`` shared tokens.
    """

    # All sub-agents share these tokens. With ``first_wins``, the next turn starts when the first
    # sub-agent ends, and its prompt contains only the last answer of this one.

    count: LengthDistribution
    """Number of sub-agents that a turn starts: a number or a distribution."""
    every: Count = 1
    """Interval, in turns, at which sub-agents are started; with 1, each turn except the last starts
    sub-agents."""
    turns: LengthDistribution = 1
    """Number of turns per sub-agent."""
    prompt_tokens: LengthDistribution
    """New prompt tokens per turn of a sub-agent."""
    output_tokens: LengthDistribution
    """Output tokens per turn of a sub-agent."""
    tool_time: TimeDistribution = 0.0
    """Seconds of tool calls between two turns of a sub-agent."""
    prefix_tokens: Annotated[int, Field(ge=0, le=MAX_TOKEN_COUNT)] = 0
    """System and tool prompt that all sub-agents of all sessions share."""
    first_wins: bool = False
    """Whether the next turn waits only for the first sub-agent that ends. The others are cancelled
    at that time: their clients disconnect. The last answers of all sub-agents that start together
    then have the same length, which is the shortest of the sampled lengths."""


class Sessions(SharedPrefixes, ArrivalProcess):
    """Conversations in which each prompt repeats all previous turns and adds new tokens.

    A turn starts ``think_time`` plus ``tool_time`` seconds after the previous answer. A session
    ends early if prompt and answer would exceed ``max_model_len``. A prompt of more than
    ``compact_at`` tokens is replaced by the shared prefix, ``compact_to`` rewritten tokens and the
    new tokens.
    """

    # The first prompt is the shared prefix, if any, and ``prompt_tokens`` new tokens.

    num_sessions: Count
    """Number of conversations."""
    turns: LengthDistribution
    """Number of turns per conversation: a number or a distribution."""
    prompt_tokens: LengthDistribution
    """New prompt tokens per turn, in addition to all previous turns."""
    output_tokens: LengthDistribution
    """Output tokens per turn. The scheduler does not see this number."""
    think_time: TimeDistribution = 0.0
    """Seconds from the end of an answer to the next turn: a number or a distribution."""
    tool_time: TimeDistribution = 0.0
    """Seconds of tool calls before the next turn, in addition to ``think_time``."""
    sub_agents: SubAgents | None = None
    """Sub-agents that turns start; the next turn waits for them."""
    compact_at: Tokens | None = None
    """Prompt length in tokens above which the context is compacted."""
    compact_to: Tokens | None = None
    """Length in tokens of a compacted context, without the shared prefix."""
    max_model_len: Tokens | None = None
    """Maximum tokens of prompt and answer; a session ends before it would exceed them."""
    seed: Seed = 0
    """Random seed for arrivals, turns and lengths."""

    @model_validator(mode="after")
    def _not_too_many(self) -> Self:
        if sum(self._counts) > MAX_REQUEST_COUNT or max(self._counts) > MAX_TURNS:
            raise ValueError(
                f"too many turns: at most {MAX_TURNS:,} per session and {MAX_REQUEST_COUNT:,} "
                f"in total; found {max(self._counts):,} and {sum(self._counts):,}"
            )
        return self

    @model_validator(mode="after")
    def _compacts(self) -> Self:
        if (self.compact_at is None) != (self.compact_to is None):
            raise ValueError("compact_at and compact_to must be set together")
        if self.compact_at is not None and self.compact_to is not None:
            least = self.prefix_tokens + self.compact_to
            if least >= self.compact_at:
                raise ValueError(
                    f"compact_at: must be greater than prefix_tokens + compact_to ({least:,}), "
                    f"got {self.compact_at:,}"
                )
        return self

    @model_validator(mode="after")
    def _not_too_many_sub_agents(self) -> Self:
        if self.sub_agents is not None:
            total = 0
            for session in range(self.num_sessions):
                total += len(self._calls(session))
                if total > MAX_REQUEST_COUNT:
                    raise ValueError(
                        f"too many requests: at most {MAX_REQUEST_COUNT:,}, including the "
                        "requests of sub-agents"
                    )
        return self

    @cached_property
    def _counts(self) -> list[int]:
        """Number of turns of each session, without the limit ``max_model_len``."""
        return sample_lengths(self.turns, make_random_stream(self.seed, 1), self.num_sessions)

    @cached_property
    def session_calls(self) -> list[list[SessionCall]]:
        """Requests of every session, in dependency order."""
        return [self._calls(session) for session in range(self.num_sessions)]

    def _lengths(self, session: int, count: int) -> list[tuple[int, int]]:
        lengths: tuple[tuple[LengthDistribution, LengthField], ...] = (
            (self.prompt_tokens, "prompt_tokens"),
            (self.output_tokens, "output_tokens"),
        )
        prompts, outputs = (
            sample_lengths(
                length, make_random_stream(self.seed, 3 + purpose, session), count, which
            )
            for purpose, (length, which) in enumerate(lengths)
        )
        return list(zip(prompts, map(self._limited, outputs), strict=True))

    def _limited(self, output: int) -> int:
        return output if self.max_tokens is None else min(output, self.max_tokens)

    def _fits(self, tokens: int) -> bool:
        return self.max_model_len is None or tokens <= self.max_model_len

    def _calls(self, session: int) -> list[SessionCall]:
        """Return the requests of a session that fit into ``max_model_len``."""
        calls: list[SessionCall] = []
        history: list[tuple[int, bool]] = []
        size, rewritten = self.prefix_tokens, 0
        counts = self._sub_agent_counts(session)
        before: tuple[int, ...] = ()
        for turn, (new, output) in enumerate(self._lengths(session, self._counts[session])):
            started: list[SessionCall] = []
            if turn and turn - 1 in counts:
                started, before = self._started(session, turn, counts[turn - 1], len(calls))
                repeated = before[:1] if self._first_wins else before
                history += [(last, False) for last in repeated]
                size += sum(started[last - len(calls)].output for last in repeated)
            if self.compact_at is not None and turn and size + new > self.compact_at:
                assert self.compact_to is not None
                history, rewritten = [], self.compact_to
                size = self.prefix_tokens + rewritten
            if turn and not self._fits(size + new + output):
                break
            calls += started
            first = self._first_wins and bool(started)
            calls.append(
                SessionCall(new, output, before, tuple(history), rewritten, first_wins=first)
            )
            own = len(calls) - 1
            history += [(own, True), (own, False)]
            size += new + output
            before = (own,)
        return calls

    @property
    def _first_wins(self) -> bool:
        return self.sub_agents is not None and self.sub_agents.first_wins

    def _sub_agent_counts(self, session: int) -> dict[int, int]:
        """Return the number of sub-agents that each turn starts."""
        rules = self.sub_agents
        if rules is None:
            return {}
        turns = range(rules.every - 1, self._counts[session] - 1, rules.every)
        counts = sample_lengths(rules.count, make_random_stream(self.seed, 8, session), len(turns))
        _check_sub_agents(counts, most=MAX_REQUEST_COUNT)
        return dict(zip(turns, counts, strict=True))

    def _started(
        self, session: int, turn: int, count: int, position: int
    ) -> tuple[list[SessionCall], tuple[int, ...]]:
        """Return the calls of the sub-agents that precede ``turn``, and the index of the last call
        of each.
        """
        # The first call is at ``position`` in the session, right after the turn that starts the
        # sub-agents.
        rules = self.sub_agents
        assert rules is not None
        random = make_random_stream(self.seed, 9, session, turn)
        calls: list[SessionCall] = []
        last: list[int] = []
        turn_counts = sample_lengths(rules.turns, random, count)
        _check_sub_agents(turn_counts, most=MAX_TURNS)
        for turns in turn_counts:
            prompts = sample_lengths(rules.prompt_tokens, random, turns, "prompt_tokens")
            outputs = sample_lengths(rules.output_tokens, random, turns, "output_tokens")
            history: list[tuple[int, bool]] = []
            size, first, before = rules.prefix_tokens, position + len(calls), position - 1
            for new, output in zip(prompts, map(self._limited, outputs), strict=True):
                if history and not self._fits(size + new + output):
                    break
                own = position + len(calls)
                calls.append(SessionCall(new, output, (before,), tuple(history), 0, first))
                history += [(own, True), (own, False)]
                size += new + output
                before = own
            last.append(before)
        if rules.first_wins:
            output = min(calls[one - position].output for one in last)
            for one in last:
                calls[one - position] = replace(calls[one - position], output=output)
        return calls, tuple(last)

    @property
    def size(self) -> int:
        """Number of requests."""
        return sum(map(len, self.session_calls))

    def _delays(self, session: int, calls: list[SessionCall]) -> Iterator[tuple[float, float]]:
        """Yield the think time and the tool time (s) before each call of a session."""
        main = [call for call in calls if call.agent < 0]
        thinks = sample_times(self.think_time, make_random_stream(self.seed, 5, session), len(main))
        tools = sample_times(self.tool_time, make_random_stream(self.seed, 7, session), len(main))
        others: list[float] = []
        if self.sub_agents is not None:
            random = make_random_stream(self.seed, 10, session)
            others = sample_times(self.sub_agents.tool_time, random, len(calls) - len(main))
        of_main, of_others = iter(zip(thinks, tools, strict=True)), iter(others)
        for position, call in enumerate(calls):
            if call.agent < 0:
                yield next(of_main)
            else:
                tool = next(of_others)
                yield 0.0, 0.0 if call.agent == position else tool

    def requests(self, timeout: float | None) -> tuple[list[Request], dict[int, Dependency]]:
        """Return the requests, and the dependencies between the turns of a session.

        Requests are numbered in order of their earliest possible arrival times.
        """
        # The times are computed as if answers took no time.
        starts = self.times(make_random_stream(self.seed, 0), self.num_sessions).tolist()
        groups = self.sample_groups(make_random_stream(self.seed, 2), self.num_sessions)
        loras = self.sample_loras(make_random_stream(self.seed, 6), self.num_sessions)
        delays = [
            list(self._delays(session, calls)) for session, calls in enumerate(self.session_calls)
        ]
        arrivals = [
            _earliest(start, calls, of_calls)
            for start, calls, of_calls in zip(starts, self.session_calls, delays, strict=True)
        ]
        order = np.argsort(np.argsort(np.concatenate(arrivals), kind="stable")).tolist()
        requests: list[Request] = []
        after: dict[int, Dependency] = {}
        first = 0
        for session, calls in enumerate(self.session_calls):
            numbers = order[first : first + len(calls)]
            repeated = {one for call in calls for one, is_prompt in call.history if is_prompt}
            first += len(calls)
            for position, call in enumerate(calls):
                number = numbers[position]
                if call.before:
                    before = tuple(numbers[one] for one in call.before)
                    delay = delays[session][position]
                    after[number] = Dependency(before, *delay, call.first_wins)
                group = groups[session] if groups else self.prefix_group
                said = self._prompt(calls, numbers, position, group)
                request = self.request(
                    number,
                    arrivals[session][position],
                    sum(end - start for _, start, end in said),
                    call.output,
                    timeout,
                    said,
                    loras[session],
                )
                if self.retention is not None and position not in repeated:
                    request = replace(request, retention=None)
                requests.append(request)
        return sorted(requests, key=lambda request: request.id), after

    def _prompt(
        self, calls: list[SessionCall], numbers: list[int], position: int, group: str | None
    ) -> tuple[Segment, ...]:
        """Return the segments of a call's prompt."""
        # ``group`` is the main agent's shared prefix.
        call = calls[position]
        said: list[Segment] = []
        if call.agent >= 0:
            assert self.sub_agents is not None
            if self.sub_agents.prefix_tokens:
                said.append(Segment("sub-agents", 0, self.sub_agents.prefix_tokens))
        elif group is not None:
            said.append(Segment(f"g{group}", 0, self.prefix_tokens))
        if call.rewritten:
            since = next((one for one, _ in call.history), position)
            said.append(Segment(f"c{numbers[since]}", 0, call.rewritten))
        for one, is_prompt in call.history:
            length = calls[one].new if is_prompt else calls[one].output
            said.append(Segment(f"{'u' if is_prompt else 'o'}{numbers[one]}", 0, length))
        said.append(Segment(f"u{numbers[position]}", 0, call.new))
        return tuple(said)


def _check_sub_agents(counts: Sequence[int], most: int) -> None:
    """Raise ValueError if a count exceeds ``most``, or if there are too many requests in total."""
    if max(counts, default=0) > most or sum(counts) > MAX_REQUEST_COUNT:
        raise ValueError(
            f"sub_agents: too many requests: at most {MAX_TURNS:,} turns per sub-agent and "
            f"{MAX_REQUEST_COUNT:,} requests in total"
        )


def _earliest(
    start: float, calls: list[SessionCall], delays: list[tuple[float, float]]
) -> list[float]:
    """Return the arrival time (s) of each call as if answers took no time."""
    found: list[float] = []
    for call, (think, tool) in zip(calls, delays, strict=True):
        if call.before:
            # Even with first_wins, a request must come after all requests that it waits for.
            found.append(max(found[one] for one in call.before) + (think + tool))
        else:
            found.append(start)
    return found

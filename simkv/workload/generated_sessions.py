"""Generated sessions: conversations and agents, whose requests wait for earlier answers.

A session is a graph of requests. Each turn waits for the answer to the previous turn, or for the
sub-agents that the previous turn started.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache, cached_property
from itertools import accumulate
from typing import LiteralString, Self

import numpy as np
from pydantic import Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

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
from simkv.workload.session_calls import MAX_TURNS, ContextRules, SessionCall
from simkv.workload.session_graph import (
    GraphTurn,
    RandomStreams,
    build_calls,
    count_copies,
    find_graph_faults,
)
from simkv.workload.sub_agents import SubAgents, check_sub_agents, start_sub_agents
from simkv.workload.workload_base import (
    MAX_REQUEST_COUNT,
    Count,
    Seed,
    Tokens,
    make_random_stream,
)

#: Fields about turns, which a template graph replaces. The first ones are required without it.
TURN_FIELDS = ("turns", "prompt_tokens", "output_tokens", "think_time", "tool_time", "sub_agents")


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
    turns: LengthDistribution | None = None
    """Number of turns per conversation: a number or a distribution. Required without ``graph``."""
    prompt_tokens: LengthDistribution | None = None
    """New prompt tokens per turn, in addition to all previous turns. Required without ``graph``."""
    output_tokens: LengthDistribution | None = None
    """Output tokens per turn. The scheduler does not see this number. Required without
    ``graph``."""
    think_time: TimeDistribution = 0.0
    """Seconds from the end of an answer to the next turn: a number or a distribution."""
    tool_time: TimeDistribution = 0.0
    """Seconds of tool calls before the next turn, in addition to ``think_time``."""
    sub_agents: SubAgents | None = None
    """Sub-agents that turns start; the next turn waits for them."""
    graph: list[GraphTurn] | None = Field(None, min_length=1)
    """Template of a session as a list of named turns that wait for each other, in place of the
    other fields about turns."""
    compact_at: Tokens | None = None
    """Prompt length in tokens above which the context is compacted."""
    compact_to: Tokens | None = None
    """Length in tokens of a compacted context, without the shared prefix."""
    max_model_len: Tokens | None = None
    """Maximum tokens of prompt and answer; a session ends before it would exceed them."""
    seed: Seed = 0
    """Random seed for arrivals, turns and lengths."""

    @model_validator(mode="after")
    def _turns_or_graph(self) -> Self:
        faults: list[InitErrorDetails] = []
        if self.graph is None:
            faults += (
                InitErrorDetails(type="missing", loc=(name,), input=None)
                for name in TURN_FIELDS[:3]
                if name not in self.model_fields_set
            )
        else:
            for name in TURN_FIELDS:
                if name in self.model_fields_set and getattr(self, name) is not None:
                    faults.append(_fault("cannot be combined with graph", name))
            for index, name, reason in find_graph_faults(self.graph):
                faults.append(_fault(reason, "graph", index, name))
        if faults:
            raise ValidationError.from_exception_data("Sessions", faults)
        return self

    @model_validator(mode="after")
    def _not_too_many(self) -> Self:
        if self.graph is not None:
            return self
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
            prefixes = (one.prefix_tokens for one in self.graph or ())
            least = max(self.prefix_tokens, *prefixes, 0) + self.compact_to
            if least >= self.compact_at:
                raise ValueError(
                    f"compact_at: must be greater than prefix_tokens + compact_to ({least:,}), "
                    f"got {self.compact_at:,}"
                )
        return self

    @model_validator(mode="after")
    def _not_too_many_requests(self) -> Self:
        counts: Iterable[int] = ()
        if self.graph is not None:
            streams = self._graph_streams()
            graph = self.graph
            counts = (sum(count_copies(graph, streams)) for _ in range(self.num_sessions))
        elif self.sub_agents is not None:
            counts = (len(self._calls(session)) for session in range(self.num_sessions))
        if any(total > MAX_REQUEST_COUNT for total in accumulate(counts)):
            raise ValueError(
                f"too many requests: at most {MAX_REQUEST_COUNT:,}, including the requests of "
                "sub-agents and copies"
            )
        return self

    @cached_property
    def _counts(self) -> list[int]:
        """Number of turns of each session, without the limit ``max_model_len``."""
        assert self.turns is not None
        return sample_lengths(self.turns, make_random_stream(self.seed, 1), self.num_sessions)

    @cached_property
    def session_calls(self) -> list[list[SessionCall]]:
        """Requests of every session, in dependency order."""
        if self.graph is not None:
            streams = self._graph_streams()
            rules = self._context_rules
            return [build_calls(self.graph, rules, streams) for _ in range(self.num_sessions)]
        return [self._calls(session) for session in range(self.num_sessions)]

    def _graph_streams(self) -> RandomStreams:
        """Return new random streams of the turns of a graph, which all sessions share."""
        return cache(lambda turn, purpose: make_random_stream(self.seed, 11, turn, purpose))

    def _lengths(self, session: int, count: int) -> list[tuple[int, int]]:
        assert self.prompt_tokens is not None
        assert self.output_tokens is not None
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
        return list(zip(prompts, map(self._context_rules.limited, outputs), strict=True))

    def _calls(self, session: int) -> list[SessionCall]:
        """Return the requests of a session that fit into ``max_model_len``."""
        calls: list[SessionCall] = []
        history: list[tuple[int, bool]] = []
        size, rewritten, rules = self.prefix_tokens, 0, self._context_rules
        counts = self._sub_agent_counts(session)
        before: tuple[int, ...] = ()
        for turn, (new, output) in enumerate(self._lengths(session, self._counts[session])):
            started: list[SessionCall] = []
            if turn and turn - 1 in counts:
                assert self.sub_agents is not None
                random = make_random_stream(self.seed, 9, session, turn)
                arguments = random, counts[turn - 1], len(calls)
                started, before = start_sub_agents(self.sub_agents, rules, *arguments)
                repeated = before[:1] if self._first_wins else before
                history += [(last, False) for last in repeated]
                size += sum(started[last - len(calls)].output for last in repeated)
            if self.compact_at is not None and turn and size + new > self.compact_at:
                assert self.compact_to is not None
                history, rewritten = [], self.compact_to
                size = self.prefix_tokens + rewritten
            if turn and not rules.fits(size + new + output):
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

    @cached_property
    def _context_rules(self) -> ContextRules:
        return ContextRules(
            *(self.prefix_tokens, self.max_tokens, self.max_model_len),
            *(self.compact_at, self.compact_to or 0),
        )

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
        check_sub_agents(counts, most=MAX_REQUEST_COUNT)
        return dict(zip(turns, counts, strict=True))

    @property
    def size(self) -> int:
        """Number of requests."""
        return sum(map(len, self.session_calls))

    def _delays(self, session: int, calls: list[SessionCall]) -> Iterator[tuple[float, float]]:
        """Yield the think time and the tool time (s) before each call of a session."""
        if self.graph is not None:
            yield from (call.delay for call in calls)
            return
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
        if call.prefix is not None:
            if call.prefix[1]:
                said.append(Segment(call.prefix[0], 0, call.prefix[1]))
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


def _fault(reason: str, *location: str | int) -> InitErrorDetails:
    """Return a validation error of the field at ``location``, which may be missing in the file."""
    kind: LiteralString = "neither" if reason.startswith("missing") else "own"
    error = PydanticCustomError(kind, "{why}", {"why": reason})
    return InitErrorDetails(type=error, loc=location, input=None)


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

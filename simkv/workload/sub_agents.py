"""Sub-agents that the turns of a generated session start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import Field

from simkv.workload.length_distributions import (
    LengthDistribution,
    TimeDistribution,
    sample_lengths,
)
from simkv.workload.session_calls import MAX_TURNS, ContextRules, SessionCall
from simkv.workload.workload_base import MAX_REQUEST_COUNT, MAX_TOKEN_COUNT, Count, StrictModel


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


def start_sub_agents(
    agents: SubAgents, rules: ContextRules, random: np.random.Generator, count: int, position: int
) -> tuple[list[SessionCall], tuple[int, ...]]:
    """Return the calls of ``count`` sub-agents, and the index of the last call of each."""
    # The first call is at ``position`` in the session, right after the turn that starts the
    # sub-agents.
    calls: list[SessionCall] = []
    last: list[int] = []
    prefix = "sub-agents", agents.prefix_tokens
    turn_counts = sample_lengths(agents.turns, random, count)
    check_sub_agents(turn_counts, most=MAX_TURNS)
    for turns in turn_counts:
        prompts = sample_lengths(agents.prompt_tokens, random, turns, "prompt_tokens")
        outputs = sample_lengths(agents.output_tokens, random, turns, "output_tokens")
        history: list[tuple[int, bool]] = []
        size, first, before = agents.prefix_tokens, position + len(calls), position - 1
        for new, output in zip(prompts, map(rules.limited, outputs), strict=True):
            if history and not rules.fits(size + new + output):
                break
            own = position + len(calls)
            repeated = tuple(history)
            calls.append(SessionCall(new, output, (before,), repeated, 0, first, prefix=prefix))
            history += [(own, True), (own, False)]
            size += new + output
            before = own
        last.append(before)
    if agents.first_wins:
        output = min(calls[one - position].output for one in last)
        for one in last:
            calls[one - position] = replace(calls[one - position], output=output)
    return calls, tuple(last)


def check_sub_agents(counts: Sequence[int], most: int) -> None:
    """Raise ValueError if a count exceeds ``most``, or if there are too many requests in total."""
    if max(counts, default=0) > most or sum(counts) > MAX_REQUEST_COUNT:
        raise ValueError(
            f"sub_agents: too many requests: at most {MAX_TURNS:,} turns per sub-agent and "
            f"{MAX_REQUEST_COUNT:,} requests in total"
        )

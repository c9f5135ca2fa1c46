"""Template graphs of sessions: named turns that wait for each other, with distributions.

    calls = build_calls(turns, ContextRules(prefix_tokens=64), stream)

Each session samples its own lengths, times and numbers of copies. The result has the same form as
the requests of other generated sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated

import numpy as np
from pydantic import Field

from simkv.core.errors import spelling_hint
from simkv.workload.length_distributions import (
    LengthDistribution,
    LengthField,
    TimeDistribution,
    sample_lengths,
    sample_times,
)
from simkv.workload.session_calls import MAX_TURNS, ContextRules, History, SessionCall
from simkv.workload.workload_base import MAX_TOKEN_COUNT, StrictModel

#: Value of ``context`` for a turn that repeats no other turn.
OWN_CONTEXT = "own"

#: Returns the random stream of a turn (by index) for a sampled field (by index).
RandomStreams = Callable[[int, int], np.random.Generator]


class GraphTurn(StrictModel):
    """A named turn of a template graph.

    The prompt consists of the inherited context, the other answers that the turn waits for, and
    ``prompt_tokens`` new tokens.
    """

    turn: Annotated[str, Field(min_length=1)]
    """Name of the turn."""
    wait_for: Annotated[list[str], Field(min_length=1)] | None = None
    """Names of the turns whose answers the turn waits for. They must be earlier in the list. Every
    turn except the first one needs this field."""
    count: LengthDistribution = 1
    """Number of parallel copies of the turn: a number or a distribution."""
    each: bool = False
    """Whether the turn continues parallel branches: it has one copy for each copy of the first turn
    in ``wait_for``, and waits only for the same copy of the turns in its branch."""
    prompt_tokens: LengthDistribution
    """New prompt tokens: a number or a distribution."""
    output_tokens: LengthDistribution
    """Output tokens. The scheduler does not see this number."""
    think_time: TimeDistribution = 0.0
    """Seconds from the last awaited answer to the turn: a number or a distribution."""
    tool_time: TimeDistribution = 0.0
    """Seconds of tool calls before the turn, in addition to ``think_time``."""
    first_wins: bool = False
    """Whether the turn waits only for the first of the awaited answers. The other requests are
    cancelled at that time, unless another turn waits for them. The awaited answers then have the
    same length, which is the shortest of the sampled lengths."""
    context: str | None = None
    """Name of the turn whose prompt and answer the prompt repeats (default: the first turn in
    ``wait_for``; of several copies, the first). With ``own``, the turn has a context of its own, as
    a sub-agent has, and repeats no answers."""
    prefix_group: Annotated[str, Field(min_length=1)] | None = None
    """Name of the shared tokens at the beginning of a context of its own. All turns and requests
    with the same name begin with the same tokens."""
    prefix_tokens: Annotated[int, Field(ge=0, le=MAX_TOKEN_COUNT)] = 0
    """Number of shared tokens at the beginning of a context of its own."""

    @property
    def prefix(self) -> tuple[str, int]:
        """Stream and number of the shared tokens of a context of its own."""
        return f"g{self.prefix_group}", self.prefix_tokens


def find_graph_faults(turns: Sequence[GraphTurn]) -> Iterator[tuple[int, str, str]]:
    """Yield the index of a turn, the field and the reason for each fault of a graph."""
    # ``answered`` maps a turn to the turns that have certainly been answered when it starts.
    answered: dict[str, set[str]] = {}
    names = [one.turn for one in turns]
    for index, one in enumerate(turns):
        earlier = set(names[:index])
        if one.turn in earlier or one.turn == OWN_CONTEXT:
            what = f"must be a unique name other than {OWN_CONTEXT!r}; found {one.turn!r}"
            yield index, "turn", what
        for name in one.wait_for or ():
            if name not in names:
                hint = spelling_hint(name, names)
                yield index, "wait_for", f"unknown turn {name!r}{hint}"
            elif name not in earlier:
                what = "must be turns that are earlier in the list, so that there is no cycle"
                yield index, "wait_for", f"{what}; found {name!r}"
        waits = [name for name in one.wait_for or () if name in answered]
        sets = [answered[name] | (set() if one.first_wins else {name}) for name in waits]
        combine = set.intersection if one.first_wins and sets else set.union
        answered[one.turn] = combine(*(sets or [set()]))
        if len(set(waits)) == len(one.wait_for or ()):
            yield from ((index, *fault) for fault in _faults(one, index, answered[one.turn]))
        elif len(waits) == len(one.wait_for or ()):
            yield index, "wait_for", "must name each turn only once"


def _faults(one: GraphTurn, index: int, answered: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the faults of a turn whose ``wait_for`` is valid."""
    if not index:
        for name in _NOT_FIRST:
            if getattr(one, name) != GraphTurn.model_fields[name].default:
                yield name, "not allowed for the first turn, which starts the session"
    elif one.wait_for is None:
        yield "wait_for", "missing; only the first turn starts without waiting"
    else:
        yield from _context_faults(one, ", ".join(sorted(answered)) or "none", answered)
    if one.each and one.count != 1:
        yield "count", "cannot be combined with each, which has one copy per copy of the branch"
    if (one.prefix_group is None) != (one.prefix_tokens == 0):
        given = "prefix_tokens" if one.prefix_group is None else "prefix_group"
        yield given, "prefix_group and prefix_tokens must be set together"
    elif one.prefix_group is not None and one.context != OWN_CONTEXT:
        yield "prefix_group", f"requires context: {OWN_CONTEXT}"


def _context_faults(one: GraphTurn, known: str, answered: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the fault of ``context``. ``known`` lists the turns in ``answered``."""
    if one.context is None and one.first_wins:
        why = f"missing; with first_wins, set a turn before the branches ({known}) or {OWN_CONTEXT}"
        yield "context", why
    elif one.context is not None and one.context not in (OWN_CONTEXT, *answered):
        yield (
            "context",
            (
                f"must be {OWN_CONTEXT} or a turn that always has an answer when this turn starts "
                f"({known}); found {one.context!r}"
            ),
        )


#: Fields that the first turn of a graph cannot have.
_NOT_FIRST = ("wait_for", "count", "each", "think_time", "tool_time", "first_wins", "context")


@dataclass(frozen=True, slots=True)
class _Copy:
    """A sampled copy of a turn, with the calls that it waits for and the one whose context it
    repeats.
    """

    turn: GraphTurn
    before: tuple[int, ...]
    parent: int | None
    new: int
    output: int
    delay: tuple[float, float]


def build_calls(
    turns: Sequence[GraphTurn], rules: ContextRules, stream: RandomStreams
) -> list[SessionCall]:
    """Return the calls of the next session of a valid graph, in dependency order.

    ``stream`` returns the same generator each time, so each session has other random values. A turn
    that does not fit into ``max_model_len`` is left out, as are all turns that wait for it. Raises
    ValueError if the session has too many turns.
    """
    copies = _sample_copies(turns, rules, stream)
    outputs = _equal_outputs(copies)
    calls: list[SessionCall] = []
    positions: dict[int, int] = {}
    sizes: list[int] = []
    for number, copy in enumerate(copies):
        if any(one not in positions for one in copy.before):
            continue
        before = tuple(positions[one] for one in copy.before)
        history: History = ()
        rewritten, size = 0, rules.prefix_tokens
        prefix: tuple[str, int] | None = None
        if copy.parent is not None:
            parent = positions[copy.parent]
            base = calls[parent]
            history = (*base.history, (parent, True), (parent, False))
            rewritten, size, prefix = base.rewritten, sizes[parent], base.prefix
            repeated = before[:1] if copy.turn.first_wins else before
            answers = tuple((one, False) for one in repeated if (one, False) not in history)
            history += answers
            size += sum(calls[one].output for one, _ in answers)
        elif copy.before:
            prefix, size = copy.turn.prefix, copy.turn.prefix_tokens
        if rules.compact_at is not None and history and size + copy.new > rules.compact_at:
            history, rewritten = (), rules.compact_to
            size = rewritten + (rules.prefix_tokens if prefix is None else prefix[1])
        size += copy.new + outputs[number]
        if copy.before and not rules.fits(size):
            continue
        positions[number] = len(calls)
        sizes.append(size)
        first_wins = copy.turn.first_wins
        calls.append(
            SessionCall(
                *(copy.new, outputs[number], before, history, rewritten),
                first_wins=first_wins,
                prefix=prefix,
                delay=copy.delay,
            )
        )
    return calls


def count_copies(turns: Sequence[GraphTurn], stream: RandomStreams) -> list[int]:
    """Return the number of copies of each turn in the next session.

    Raises ValueError if the session has too many turns.
    """
    counts: dict[str, int] = {}
    for index, turn in enumerate(turns):
        if turn.each and turn.wait_for:
            counts[turn.turn] = counts[turn.wait_for[0]]
        else:
            counts[turn.turn] = _lengths(turn, "count", 1, stream, index)[0]
        if (total := sum(counts.values())) > MAX_TURNS:
            raise ValueError(
                f"graph: too many turns: at most {MAX_TURNS:,} per session; found {total:,} up to "
                f"turn {turn.turn!r}"
            )
    return list(counts.values())


def _sample_copies(
    turns: Sequence[GraphTurn], rules: ContextRules, stream: RandomStreams
) -> list[_Copy]:
    """Return the copies of all turns, each after the copies that it waits for."""
    copies: list[_Copy] = []
    of: dict[str, range] = {}
    counts = count_copies(turns, stream)
    branch: dict[str, str] = {}  # the turn that starts the parallel branches of a turn
    for index, turn in enumerate(turns):
        awaited = turn.wait_for or []
        branch[turn.turn] = branch[awaited[0]] if turn.each else turn.turn
        count = counts[index]
        of[turn.turn] = range(len(copies), len(copies) + count)
        own = {name for name in of if branch[name] == branch[turn.turn]}
        prompts = _lengths(turn, "prompt_tokens", count, stream, index)
        outputs = _lengths(turn, "output_tokens", count, stream, index)
        thinks = _times(turn, "think_time", count, stream, index)
        tools = _times(turn, "tool_time", count, stream, index)
        context = (turn.context or awaited[0]) if awaited else OWN_CONTEXT
        everything = tuple(one for name in awaited for one in of[name])
        for copy in range(count):
            before = everything
            if turn.each:
                same = ((of[name][copy],) if name in own else of[name] for name in awaited)
                before = tuple(chain.from_iterable(same))
            parent = None
            if context != OWN_CONTEXT:
                parent = of[context][copy if context in own else 0]
            output, delay = rules.limited(outputs[copy]), (thinks[copy], tools[copy])
            copies.append(_Copy(turn, before, parent, prompts[copy], output, delay))
    return copies


#: Sampled fields. Each has its own random stream, by its index.
_SAMPLED = ("count", "prompt_tokens", "output_tokens", "think_time", "tool_time")


def _lengths(
    turn: GraphTurn, name: str, count: int, stream: RandomStreams, index: int
) -> list[int]:
    """Sample the lengths ``name`` of ``count`` copies."""
    length: LengthDistribution = getattr(turn, name)
    if isinstance(length, int):
        return [length] * count
    which: LengthField = "output_tokens" if name == "output_tokens" else "prompt_tokens"
    return sample_lengths(length, stream(index, _SAMPLED.index(name)), count, which)


def _times(
    turn: GraphTurn, name: str, count: int, stream: RandomStreams, index: int
) -> list[float]:
    """Sample the times ``name`` of ``count`` copies in seconds."""
    time: TimeDistribution = getattr(turn, name)
    if isinstance(time, int | float):
        return [float(time)] * count
    return sample_times(time, stream(index, _SAMPLED.index(name)), count)


def _equal_outputs(copies: Sequence[_Copy]) -> list[int]:
    """Return the output length of each copy.

    If a turn waits for the first of several answers, these answers get the shortest of their
    sampled lengths.
    """
    outputs = [copy.output for copy in copies]
    changed = True
    while changed:
        changed = False
        for copy in copies:
            awaited = {outputs[one] for one in copy.before} if copy.turn.first_wins else set()
            if len(awaited) > 1:
                changed = True
                for one in copy.before:
                    outputs[one] = min(awaited)
    return outputs

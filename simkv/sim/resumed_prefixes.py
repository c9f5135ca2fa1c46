"""Prompt prefixes whose KV was already computed by earlier turns of the same session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from simkv.core.request import Request, Segment
from simkv.sim.run_record import ResumedPrefix, RunRecord
from simkv.workload.clients import Dependency


def find_resumed_prefixes(
    record: RunRecord, after: Mapping[int, Dependency], block_size: int
) -> dict[int, ResumedPrefix]:
    """Return the part of each prompt that earlier turns of the session have computed.

    ``after`` contains the requests and their earlier turns. If several turns share a prefix with
    the prompt, the longest prefix is returned. Lengths are multiples of ``block_size`` tokens.
    """
    # Earlier turns are the turns that the request waits for. If the request does not repeat such a
    # turn completely, the turns before it count as well, because an agent that waited for
    # sub-agents continues its own last turn. A prefix never contains the last token of the prompt,
    # which is always computed.
    found: dict[int, ResumedPrefix] = {}
    for number, dependency in after.items():
        life = record.requests.get(number)
        if life is None or not life.request.segments:
            continue
        request, best = life.request, ResumedPrefix(0, 0)
        earlier, seen = list(dependency.before), set(dependency.before)
        for i in earlier:
            before = record.requests.get(i)
            shared = reached = 0
            if before is not None and before.segment_data:
                answer = Segment(f"o{i}", 0, before.tokens)
                shared = count_shared((*_segments(before.request), answer), request.segments)
                reached = before.request.prompt_tokens + before.tokens
            if shared < reached or not reached:
                further = [one for one in after[i].before if one not in seen] if i in after else []
                earlier += further
                seen.update(further)
            # The KV of the last answer token is not computed.
            shared = min(shared, reached - 1)
            if before is not None and shared > best.tokens:
                best = ResumedPrefix(shared, before.segments[-1].last)
        tokens = min(best.tokens, request.prompt_tokens - 1) // block_size * block_size
        if tokens > 0:
            found[number] = best._replace(tokens=tokens)
    return found


def _segments(request: Request) -> tuple[Segment, ...]:
    """Return the segments of a request's prompt."""
    # A prompt without segments is returned as one segment that only later requests can share.
    return request.segments or (Segment(f"u{request.id}", 0, request.prompt_tokens),)


def count_shared(one: Sequence[Segment], other: Sequence[Segment]) -> int:
    """Return the length in tokens of the common beginning of two sequences of segments."""
    count = first = second = 0
    of_one = of_other = 0  # tokens of the current segments that are already counted
    while first < len(one) and second < len(other):
        a, b = one[first], other[second]
        if a.stream != b.stream or a.start + of_one != b.start + of_other:
            break
        equal = min(a.end - a.start - of_one, b.end - b.start - of_other)
        count, of_one, of_other = count + equal, of_one + equal, of_other + equal
        if of_one == a.end - a.start:
            first, of_one = first + 1, 0
        if of_other == b.end - b.start:
            second, of_other = second + 1, 0
    return count

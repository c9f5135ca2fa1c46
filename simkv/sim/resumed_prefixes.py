"""Prompt prefixes whose KV was already computed by earlier turns of the same session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from simkv.core.request import Segment
from simkv.sim.run_record import ResumedPrefix, RunRecord
from simkv.workload.clients import Dependency


def find_resumed_prefixes(
    record: RunRecord, after: Mapping[int, Dependency], block_size: int
) -> dict[int, ResumedPrefix]:
    """Return the prefix that each request in ``after`` could reuse from an earlier turn.

    Only earlier turns in ``record`` count. If several of them share a prefix with the prompt, the
    longest one counts. The last token of a prompt is always computed. ``block_size`` is in tokens.
    """
    found: dict[int, ResumedPrefix] = {}
    for number, dependency in after.items():
        life = record.requests.get(number)
        if life is None or not life.request.segments:
            continue
        request, best = life.request, ResumedPrefix(0, 0)
        for i in dependency.before:
            before = record.requests.get(i)
            if before is None or not before.segment_data:
                continue
            answer = Segment(f"o{i}", 0, before.tokens)
            shared = count_shared((*before.request.segments, answer), request.segments)
            # The KV of the last answer token is not computed.
            shared = min(shared, before.request.prompt_tokens + before.tokens - 1)
            if shared > best.tokens:
                best = ResumedPrefix(shared, before.segments[-1].last)
        tokens = min(best.tokens, request.prompt_tokens - 1) // block_size * block_size
        if tokens > 0:
            found[number] = best._replace(tokens=tokens)
    return found


def count_shared(one: Sequence[Segment], other: Sequence[Segment]) -> int:
    """Return the number of equal tokens at the beginning of two sequences of segments."""
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

# mypyc: compile
"""Verification of draft tokens by the model.

The scheduler learns the result only when the batch completes.
"""

from __future__ import annotations

from simkv.core.scheduler_protocol import DraftedTokens
from simkv.sim.run_record import RequestRecord


def verify_drafts(
    drafted: DraftedTokens, emits: list[int], lives: dict[int, RequestRecord], left: dict[int, int]
) -> dict[int, int]:
    """Return the number of accepted draft tokens of each request in ``emits``.

    ``left`` is the number of tokens that each request still has to emit.
    """
    # The numbers are also stored in ``drafted.accepted``.
    accepted, drafts_of, padding = drafted.accepted, drafted.tokens, drafted.padding
    for i in emits:
        count, more = 0, left[i] - 1
        drafts = 0 if i in padding else drafts_of.get(i, 0)
        if drafts and more > 0:
            request = lives[i].request
            if request.acceptance is not None:
                place = request.output_tokens - more - 1
                count = min(request.acceptance.accepted(place, drafts), more)
        accepted[i] = count
    return accepted


def repeat_per_token(delivered: list[int], drafted: DraftedTokens) -> list[int]:
    """Return the ids in ``delivered``. Each id occurs once per token that its client receives."""
    return [i for i in delivered for _ in range(1 + drafted.accepted.get(i, 0))]

"""What becomes of drafts while a batch is on the GPU: the model's word, which no scheduler sees."""

from __future__ import annotations

from simkv.core.scheduler_protocol import DraftedTokens
from simkv.sim.run_record import RequestRecord


def verify_drafts(
    drafted: DraftedTokens, emits: list[int], lives: dict[int, RequestRecord], left: dict[int, int]
) -> dict[int, int]:
    """How many drafts are accepted of those who emit, which have so many tokens ``left``; notes
    it in the batch."""
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
    """Whose clients are given a token, as often as they are."""
    return [i for i in delivered for _ in range(1 + drafted.accepted.get(i, 0))]

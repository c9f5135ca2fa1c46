"""The final of a search: the best few on trials of their own, by which none of them was chosen.

The best of many is the best by luck, too; that does not last on other seeds.
"""

from __future__ import annotations

from math import ceil

from simkv.study.evolve.policy_search import prune_policy
from simkv.study.evolve.tournament import SHIPPED, CandidateScore, Tournament
from simkv.study.evolve.trial_conditions import TrialSplit

#: The share of a budget that is kept for the final, and of that the share of the finalists; what is
#: left is for the winner with less.
FINAL_SHARE, FINALIST_SHARE = 0.1, 0.6


def count_final_candidates(budget: int, ground: TrialSplit) -> int:
    """How many of a budget are tried in the final: none if there are too few."""
    seats = int(budget * FINAL_SHARE)
    return seats if ground.final and seats > 1 else 0


def run_final(
    contest: Tournament, ground: TrialSplit, seats: int
) -> tuple[CandidateScore, list[CandidateScore]]:
    """The winner, and how all did who were in the final; without one, the best of the search."""
    if not seats:
        return prune_policy(contest, contest.front()[0]), []
    final = Tournament(ground.final, contest.goals, contest.limits, contest.bench)
    final.start()
    best = _best(contest)[: max(ceil(seats * FINALIST_SHARE), 2)]
    best = final.add([one.candidate for one in best], thorough=True)
    winner = min([*best, final.standings[SHIPPED.key]], key=lambda one: one.score)
    winner = prune_policy(final, winner, seats - len(best))
    return winner, [one for key, one in final.standings.items() if key != SHIPPED.key]


def _best(contest: Tournament) -> list[CandidateScore]:
    """The best first; of those that did the same in every trial the shortest."""
    found: dict[object, CandidateScore] = {}
    tried = [one for key, one in contest.standings.items() if key != SHIPPED.key and not one.why]
    for one in sorted(tried, key=lambda one: (one.score, one.candidate.parts)):
        found.setdefault((one.losses, one.left_out), one)
    return list(found.values())

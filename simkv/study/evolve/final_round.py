"""Final round of a search: the best candidates compete on trials that were not used to select them.

The best of many candidates is partly best by chance, which does not carry over to other seeds.
"""

from __future__ import annotations

from math import ceil

from simkv.study.evolve.policy_search import prune_policy
from simkv.study.evolve.tournament import SHIPPED, CandidateScore, Tournament
from simkv.study.evolve.trial_split import TrialSplit

#: Fraction of the budget for the final, and fraction of that for the finalists; the rest is for
#: pruning the winner.
FINAL_SHARE, FINALIST_SHARE = 0.1, 0.6


def count_final_candidates(budget: int, ground: TrialSplit) -> int:
    """Return the number of candidates for the final round; 0 if the budget is too small."""
    seats = int(budget * FINAL_SHARE)
    return seats if ground.final and seats > 1 else 0


def run_final(
    tournament: Tournament, ground: TrialSplit, seats: int
) -> tuple[CandidateScore, list[CandidateScore]]:
    """Return the winner and the scores in the final; without a final, the best of the search."""
    if not seats:
        return prune_policy(tournament, tournament.front()[0]), []
    final = Tournament(ground.final, tournament.goals, tournament.limits, tournament.runner)
    final.start()
    best = _best(tournament)[: max(ceil(seats * FINALIST_SHARE), 2)]
    best = final.add([one.candidate for one in best], thorough=True)
    winner = min([*best, final.standings[SHIPPED.key]], key=lambda one: one.score)
    winner = prune_policy(final, winner, seats - len(best))
    return winner, [one for key, one in final.standings.items() if key != SHIPPED.key]


def _best(tournament: Tournament) -> list[CandidateScore]:
    """Return the candidates, best first; among equal results in all trials, only the shortest."""
    found: dict[object, CandidateScore] = {}
    tried = [one for key, one in tournament.standings.items() if key != SHIPPED.key and not one.why]
    for one in sorted(tried, key=lambda one: (one.score, one.candidate.parts)):
        found.setdefault((one.losses, one.left_out), one)
    return list(found.values())

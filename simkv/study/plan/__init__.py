"""Capacity planning: the smallest fleet or cache, or the highest rate, that meets objectives.

``plan_preparation`` checks a request, and ``candidate_search`` selects the next candidates.
``candidate_results`` stores results, and ``capacity_plan`` makes the plan. ``plan_confidence`` is
the uncertainty of the answer, ``plan_cost`` is its cost, and ``rate_cliff`` runs it at other
request rates. ``plan_summary`` and ``plan_tables`` present the plan.
"""

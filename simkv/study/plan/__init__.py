"""Capacity planning: the smallest fleet or cache, or the highest rate, that meets objectives.

``plan_preparation`` checks a request, ``candidate_search`` selects the next candidates,
``candidate_results`` stores their results and ``capacity_plan`` combines them. ``plan_confidence``
computes the uncertainty of the answer, ``plan_cost`` its cost, and ``rate_cliff`` the results at
other request rates. ``plan_summary`` and ``plan_tables`` present the plan.
"""

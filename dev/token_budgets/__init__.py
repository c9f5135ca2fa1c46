"""Test whether a profile that was fitted at one token budget is accurate at others.

The ground truth is synthetic, because no two public records of one device differ in their budget.
``known_devices`` has devices with exactly known costs, which are made up or read from kernel
tables. ``made_loads`` runs requests on these devices, in isolation or under load. ``budget_pairs``
fits profiles at one budget and predicts the loads at all budgets.
"""

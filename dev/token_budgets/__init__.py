"""Test whether a profile holds at a token budget that it was not fitted at.

The ground truth is synthetic, because no two public records of one device differ in their budget.
``known_devices`` has devices with exactly known costs, planted or read from kernel tables;
``made_loads`` runs requests on them, in isolation or under load; ``budget_pairs`` fits at one
budget and predicts the others.
"""

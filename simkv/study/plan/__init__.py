"""Capacity planning: the smallest fleet or cache, or the highest rate, that meets objectives.

``objectives`` say what must hold, ``search`` where to look next, ``board`` what is known of each
candidate, ``plan`` puts them together; ``uncertain`` says how sure the answer is, ``price`` what it
costs, ``cliff`` what happens at other rates; ``tables``, ``pictures`` and ``write`` show it.
"""

"""Does a profile hold at a token budget that it was not fitted at? Truth that is made, for no two
public records of one device differ in their budget.

``devices`` are costs known to the last digit, planted or read from kernel tables; ``made`` has
requests run on them, alone or many at once; ``pairs`` fits at one budget and predicts the others.
"""

"""The parts of a step, a kind of layer or of work a file: each gives ``Part``s to ``compose``."""

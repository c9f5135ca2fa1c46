"""The parts of a step, which ``compose`` combines into a profile; one module per kind of
operator.
"""

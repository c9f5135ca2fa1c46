"""The parts of a step, which ``compose`` combines into a profile. One module per kind of
operator.
"""

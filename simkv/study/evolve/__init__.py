"""Search for a better scheduler: engine settings, policies in the policy language, or external
code.
"""

"""Search the history of an engine for the commit or release that changes the result of a
scenario.
"""

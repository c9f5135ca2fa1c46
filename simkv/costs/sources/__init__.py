"""Cost profiles from measurements of other projects, one module per source, and table readers.

``single_request_fit`` fits a profile to requests that ran in isolation on an engine.
"""

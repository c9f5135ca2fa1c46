"""Build cost profiles from measurements of other projects, with one module per source.

``single_request_fit`` fits a profile to requests in isolation.
"""

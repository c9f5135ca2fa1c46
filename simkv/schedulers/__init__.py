"""The schedulers of real engines: a folder each, and their list in ``registry``."""

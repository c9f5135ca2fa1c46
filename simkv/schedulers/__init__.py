"""Schedulers of real engines: one package each, listed in ``engine_registry``."""

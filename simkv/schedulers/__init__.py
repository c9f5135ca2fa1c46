"""Schedulers of the supported engines, one package per engine, listed in ``engine_registry``."""

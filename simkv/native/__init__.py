"""Native engine: run the schedulers of the engines themselves, with stubs for their imports.

Each source of an engine (a checkout, a wheel, an installed package) runs in a separate process.
"""

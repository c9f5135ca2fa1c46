"""Native engine: run the engines' own scheduler code, with stubs for its imports.

The code of an engine (its *source*: a checkout, a wheel or an installed package) runs in a separate
process.
"""

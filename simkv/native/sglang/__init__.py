"""Native SGLang: its own scheduler code behind import stubs."""

"""Native vLLM: its own scheduler code behind import stubs."""

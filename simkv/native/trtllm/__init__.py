"""Native TensorRT-LLM: its own scheduler code behind import stubs."""

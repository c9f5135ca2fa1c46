"""TensorRT-LLM: its capacity scheduler, its micro-batcher, and the loop of its PyTorch backend."""

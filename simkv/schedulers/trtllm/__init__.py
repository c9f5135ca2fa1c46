"""TensorRT-LLM: capacity scheduler, micro-batch scheduler, and the PyTorch backend's loop."""

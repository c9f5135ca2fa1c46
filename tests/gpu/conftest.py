"""One thread per test process: the tiny model is faster that way, and CI has few cores."""

import torch

torch.set_num_threads(1)

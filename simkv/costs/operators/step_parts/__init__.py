"""Parts of a step, one module per kind of layer or work, for ``compose``."""

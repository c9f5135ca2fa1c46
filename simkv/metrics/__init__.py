"""What came of a run: figures, goodput, how far they can be trusted."""

"""Evidence: recorded decisions, recorded runs, public incidents."""

"""The loop: engine, clock, record, the pipeline of three threads, and fleets."""

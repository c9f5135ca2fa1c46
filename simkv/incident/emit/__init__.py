"""Write a simulated run in the formats of a real server's output, for tests of the readers."""

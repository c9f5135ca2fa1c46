"""Replay recorded decisions of real engines and compare every step."""

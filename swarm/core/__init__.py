"""Decisions: pure functions and machines. Standard library only; `now` and `rng` are arguments."""

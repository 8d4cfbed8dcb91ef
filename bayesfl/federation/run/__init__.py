"""Runs: `simulate`, its result, loading and continuing."""

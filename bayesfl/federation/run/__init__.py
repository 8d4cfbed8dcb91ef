"""Runs: `simulate`, its result, loading and going on."""

"""Files of a run, and its identity."""

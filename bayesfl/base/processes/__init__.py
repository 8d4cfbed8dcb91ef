"""Several processes of one run: ranks, what they send each other, and child processes."""

"""Several processes of one run: ranks, their messages, and child processes."""

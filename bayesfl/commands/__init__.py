"""The command line, `bayesfl` or `python -m bayesfl`."""

"""Runs the command line: `python -m bayesfl`."""

import sys

from bayesfl.commands.main import main

if __name__ == "__main__":
    sys.exit(main())

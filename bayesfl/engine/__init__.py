"""Running phases for chunks of clients: one driver and four kernels, which give the same
numbers.
"""

from bayesfl.engine.driver import Engine

__all__ = ["Engine"]

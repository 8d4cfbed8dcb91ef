"""Running phases for chunks of clients: one driver and four kernels with the same results."""

from bayesfl.engine.driver import Engine

__all__ = ["Engine"]

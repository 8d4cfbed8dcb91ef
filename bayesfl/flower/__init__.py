"""Federations over a network: the same algorithms, with messages sent by Flower (install
`bayesfl[flower]`).
"""

from bayesfl.federation.errors import BadClients
from bayesfl.flower.deployed import Deployed, load
from bayesfl.flower.leaving import leaves
from bayesfl.flower.node_app import client_app
from bayesfl.flower.server import serve, server_app
from bayesfl.flower.statistics import analyse, analysis_app, site_app

__all__ = [
    "BadClients",
    "Deployed",
    "analyse",
    "analysis_app",
    "client_app",
    "leaves",
    "load",
    "serve",
    "server_app",
    "site_app",
]


def __dir__() -> list[str]:
    return sorted(__all__)

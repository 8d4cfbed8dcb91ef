"""pFedVEM over a network: the method and the data in `task`, a server and a client of a
few lines.
"""

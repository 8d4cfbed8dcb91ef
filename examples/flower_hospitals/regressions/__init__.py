"""Regressions over hospitals: the tables of a site, the analysis, and the server that runs it."""

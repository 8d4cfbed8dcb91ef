"""Posteriors of any log density over sites: the sites' integrals, the questions, and the fit."""

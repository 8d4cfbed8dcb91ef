"""Posteriors of any log density over sites: what a site integrates, the questions, and the fit."""

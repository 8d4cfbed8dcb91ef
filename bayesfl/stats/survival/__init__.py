"""Survival over sites: regressions of hazards, curves and tests."""

"""Evaluation of predictions: measures, calibration, detection of unfamiliar inputs, histories,
tables and plots.
"""

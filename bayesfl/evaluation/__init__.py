"""How good predictions are, and how sure: measures, calibration, detection of outsiders, histories, tables, plots."""

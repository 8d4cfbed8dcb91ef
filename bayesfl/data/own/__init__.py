"""Federations of a user's own arrays, data sets and frames."""

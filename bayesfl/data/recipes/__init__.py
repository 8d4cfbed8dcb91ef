"""Recipes: published divisions of data sets among clients."""

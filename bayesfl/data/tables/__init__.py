"""Frames and their columns."""

"""Draws from the posterior of one module: what they are, and the samplers that make them."""

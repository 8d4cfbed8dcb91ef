"""Draws from the posterior of one module, and the samplers that make them."""

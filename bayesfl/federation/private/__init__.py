"""Secrets from the server: secure sums, and privacy of clients."""

"""Privacy towards the server: secure sums, and differential privacy of clients."""

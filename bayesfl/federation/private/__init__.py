"""What the server may not see: secure sums, and privacy of clients."""

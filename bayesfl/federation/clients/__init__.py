"""A client: its training, its predictions, its answers, and its own model."""

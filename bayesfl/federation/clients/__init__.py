"""What happens at a client: its training, its predictions, what it answers, and its own model."""

"""A client: its training, predictions, survey answers and model."""

"""What everything stands on: the types that parts agree on, addressed randomness, files, checks of what users pass."""

"""What a run is, and how it lies in files."""

"""What a test deploys."""

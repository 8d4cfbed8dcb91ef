"""Rounds: the cohort, the replies that are accepted, and the server's update."""

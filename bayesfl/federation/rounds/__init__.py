"""Rounds: who is asked, which replies are taken, and what the server makes of them."""

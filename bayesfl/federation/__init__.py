"""A federation at work: what is sent, which replies are taken, what the server makes of them, and what is kept."""

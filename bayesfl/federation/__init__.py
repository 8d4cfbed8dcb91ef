"""The federation: what is sent, which replies are admitted, how the server combines them, and how
runs are stored.
"""

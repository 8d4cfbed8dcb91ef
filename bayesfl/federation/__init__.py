"""The federation: messages, admission of replies, the server's updates, and stored runs."""

"""Records that sites keep of their questions."""

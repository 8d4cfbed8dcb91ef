"""Display to people: pieces of HTML, whole pages of them, bars of progress."""

"""What people look at: pieces of HTML, whole pages of them, bars of progress."""

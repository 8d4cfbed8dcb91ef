"""Studies: a grid of methods, options and seeds, run resumably, and the table of its runs."""

"""The runtime: a plan's cache. It imports neither solvers nor data sets nor the command line."""

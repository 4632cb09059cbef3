"""Files and arguments of other programs, written from a plan: each target's own, in a file of its own."""

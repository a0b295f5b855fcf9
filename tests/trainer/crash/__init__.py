"""Kills real processes at every system call that changes a directory, and looks at what is left."""

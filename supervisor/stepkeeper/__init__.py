"""Stepkeeper: the supervisor, the node watchers and the command line.  Never imports torch."""

__version__ = "0.1.0"

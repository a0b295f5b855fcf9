"""Stepkeeper: the supervisor, the node watchers and the command line.  Never imports torch."""

from __future__ import annotations

try:
    from stepkeeper._version import version as __version__
except ImportError:  # a source tree that nobody has installed
    __version__ = "0.0.0+uninstalled"

__all__ = ["__version__"]

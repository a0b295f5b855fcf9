"""Carrying out effects.  Actions only act; what takes time reports its outcome as an event."""

"""The run directory and its storage: who holds it, whether it has room, which steps stay.  Needs no torch."""

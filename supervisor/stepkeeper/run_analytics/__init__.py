"""What happened in a run: journal, metrics and step directories -> one timeline, and where the time went.

`reading` does all I/O; the rest is pure, and the same for `status`, `report` and the tests.
"""

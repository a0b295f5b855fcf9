"""What can go wrong with a lab, as exceptions a test can tell apart."""


class LabError(Exception):
    """The lab cannot do what it was asked; the message says what to look at."""


class LabTimeoutError(LabError):
    """Something did not happen in time: the message carries the last known facts."""

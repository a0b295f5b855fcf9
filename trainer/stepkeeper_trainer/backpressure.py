"""What a new save does while one is in flight: pure decisions, the same on every rank.

There is one staging arena, so two saves never run beside each other.
"""

from __future__ import annotations

from typing import Literal

WhenBusy = Literal["wait", "skip", "cancel"]
SURE_FACTOR = 1.5  # a save may take so much longer than the one before


def on_periodic(when_busy: WhenBusy, *, in_flight_protected: bool) -> WhenBusy:
    """Say what becomes of a periodic save that falls due while one is in flight.

    `wait`: it begins as soon as the other is done. `skip`: it is left out. `cancel`: the other is given up
    for it; but one that another was given up for is protected, so that not every save ends like that.

    >>> on_periodic("cancel", in_flight_protected=True)
    'wait'
    """
    if when_busy == "cancel" and in_flight_protected:
        return "wait"
    return when_busy


def take_over(*, left_s: float, in_flight_s: float, new_s: float) -> bool:
    """Say whether an emergency save gives up the one in flight: when there is time for the newer state only.

    Args:
        left_s: until the deadline.
        in_flight_s: that the one in flight still needs, by the slowest rank's estimate.
        new_s: that a new one needs.

    >>> take_over(left_s=100, in_flight_s=20, new_s=30)  # both fit
    False
    >>> take_over(left_s=50, in_flight_s=25, new_s=30)
    True
    >>> take_over(left_s=35, in_flight_s=25, new_s=30)  # the new one may well be too late: keep what is nearly there
    False
    """
    return in_flight_s + new_s > left_s >= SURE_FACTOR * new_s

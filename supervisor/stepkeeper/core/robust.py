"""Middle and spread of measurements of which some are far off.  Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

MAD_TO_SIGMA = 1.4826  # of a normal distribution


def median_mad(values: Sequence[float]) -> tuple[float, float]:
    """Return the median, and the standard deviation as the median distance from it tells it; of at least one value."""
    median = statistics.median(values)
    return median, MAD_TO_SIGMA * statistics.median([abs(each - median) for each in values])

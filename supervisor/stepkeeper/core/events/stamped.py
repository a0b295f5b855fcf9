"""What all events have."""

from __future__ import annotations

import msgspec


class Stamped(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event"):
    """Something that happened; its source says when, in Unix seconds that never go backwards."""

    at: float

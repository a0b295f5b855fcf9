"""The queue between the sources and the supervisor's loop."""

from __future__ import annotations

from stepkeeper import inbox
from stepkeeper.core.events import Event


class Inbox(inbox.Inbox[Event]):
    """Events on their way to the loop."""

"""Where events come from.  Sources only emit; none decides."""

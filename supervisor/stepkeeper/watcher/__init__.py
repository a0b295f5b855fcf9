"""One light process on every node of the job: it senses, relays and obeys, and decides nothing.

The one exception is the rescue, when the supervisor is gone.
"""

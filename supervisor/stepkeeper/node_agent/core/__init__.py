"""The agent's rules.  Pure: no clock, no I/O, no log, no thread; time is `event.at`.

incidents   sightings become incidents: one fault seen often, by kernel and NVML, is one
escalation  what has come back is more than what it says it is
breaker     how many nodes we may hold, and who gives his back
plan        which call comes next: at most one is in flight
decide      one event in, the next state and the work order out
"""

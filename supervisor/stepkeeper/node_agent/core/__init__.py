"""The agent's rules.  Pure: no clock, no I/O, no log, no thread; time is `event.at`.

state      where the agent stands, and the policy
events     what comes in: events; what comes out: effects
incidents  sightings become incidents: one fault seen often, by kernel and NVML, is one; what has come back is more
plan       which call comes next: at most one is in flight; how many nodes we may hold
answers    what comes of an answer, up to the end of a drain
decide     one event in, the next state and the work order out
"""

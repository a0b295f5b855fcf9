"""The fault plane of one node: what its GPUs report, what that means, and who may act on it.

In the order of the data:

    kernel, nvml     sensors on threads: kernel log, counters, NVML in a process of its own; they report `readings`
    evaluate, xid/   judge a reading by what was known before, and by catalogue, text and recovery action: faults
    core/            the agent's rules, pure: an event changes the state, and asks for effects
    agent            the loop (root, one a node); the `ledger` gets what differs between two states
    runtime          what the loop runs on; its acts ask Slurm and mend, and each answer is an event
    server           the socket: jobs hear of faults, ask for a look, or to be eligible at once (`expedite_requeue`);
                     `connections` says who a peer is and how much he may have, `requests` what he gets; all speak
                     `protocol`

`config` is the administrator's file, `setup` finds what is wrong with it, `checks` says whether a node is fit for a
launch.  Watchers use sensors, `evaluate` and `xid` too; only the agent acts on a node.
"""

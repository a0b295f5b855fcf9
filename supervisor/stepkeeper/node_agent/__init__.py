"""The fault plane of one node: what its GPUs report, what that means, and who may act on it.

    sensors/   read the kernel log, NVML and sysfs; decide nothing
    xid/       what a report means: catalogue, parser, payloads; pure
    the rest   the agent (root, one a node): incidents, their ledger, drains, the socket

Watchers use `sensors` and `xid` too; only the agent acts on a node.
"""

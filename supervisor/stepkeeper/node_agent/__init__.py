"""The fault plane of one node: what its GPUs report, what that means, and who may act on it.

    kernel, nvml   read the kernel log, sysfs and NVML, and report `readings`; they cannot hang us
    xid/           what a report means: catalogue, parser, payloads; pure
    core/          the agent's rules; pure
    agent          the loop (root, one a node), with its `runtime`: log, systemd, sensors, acts; and its `ledger`
    server         the socket for jobs, with its `connections` and `requests`; they speak `protocol`

Watchers use the sensors and `xid` too; only the agent acts on a node.
"""

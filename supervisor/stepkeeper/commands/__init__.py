"""The command line: one module a command, each thin: arguments in, a call, words out.

A command module has `add(subcommands)`, which declares its arguments, and `execute(arguments)`, which
returns the exit code.
"""

from __future__ import annotations

from stepkeeper.commands import (
    checkpoints,
    completion,
    dev,
    doctor,
    events,
    explain,
    logs,
    man,
    node,
    plan,
    report,
    run,
    save,
    selftest,
    status,
    stop,
    submit,
    xid,
)

COMMANDS = (
    run,
    submit,
    status,
    save,
    stop,
    events,
    logs,
    report,
    explain,
    checkpoints,
    plan,
    doctor,
    selftest,
    xid,
    node,
    completion,
    man,
    dev,
)

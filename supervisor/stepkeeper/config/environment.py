"""The `STEPKEEPER_*` variables: settings, what ranks are told, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping

from stepkeeper.config.files import Entry
from stepkeeper.config.settings import SETTINGS, VARIABLE_PREFIX, variable
from stepkeeper.config.values import REMOVED, from_text, nearest, refuse_removed, shown
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.slurm.environment import KEPT

# What Stepkeeper tells ranks and watchers: a run that is started inside another one inherits it.
TOLD = frozenset(
    VARIABLE_PREFIX + name
    for name in (
        "SOCKET", "RUN_ID", "ATTEMPT", "LAUNCH", "RESUME_FROM", "TASKS_PER_NODE", "AGENT_SOCKET", "WATCHER",
        "STANDBY", "STANDBY_WORDS",
        "ERROR_DIR", "REASON", "EXIT_CODE", "CAUSE", "JOB_ID",  # the last four the notify command
        "RESUME_NEWEST", "RELIABILITY", "SKIP_DATA",
        "CONTINUES",  # what a job that was submitted in place of another is told
    )
)  # fmt: skip
# What a site's environment module sets for any software; the training may want it, we do not.
MODULES = frozenset(VARIABLE_PREFIX + name for name in ("BASE", "DIR", "HOME", "PREFIX", "ROOT", "VERSION"))


def read(environment: Mapping[str, str]) -> dict[str, Entry]:
    """Return what the environment sets, by key.  An empty variable sets nothing.

    Raises:
        StepkeeperError: a variable is not known, or its value is wrong.
    """
    removed = {variable(key): key for key in REMOVED}
    by_variable = {setting.variable: setting for setting in SETTINGS.values() if setting.variable}
    entries = {}
    for name, text in sorted(environment.items()):
        if not name.startswith(VARIABLE_PREFIX) or name in TOLD or name in MODULES or name.startswith(KEPT):
            continue
        refuse_removed(removed.get(name, ""), name)
        if name not in by_variable:
            raise StepkeeperError(
                f"{shown(name)}: no such setting{nearest(name, by_variable)}; unset it: a setting that is not known is "
                "never ignored",
                ExitCode.USAGE,
            )
        if text:
            setting = by_variable[name]
            entries[setting.key] = Entry(from_text(setting, text, name), name)
    return entries

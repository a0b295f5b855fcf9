"""`docs/configuration.md`: every setting, from its declaration."""

from __future__ import annotations

from stepkeeper.config.settings import GROUP, SETTINGS, Setting
from stepkeeper.config.values import shown
from tests.pages.tables import MADE, linked

_LEAD = """
`stepkeeper run --print-config` shows every setting with its value, its unit and where it came from (`--json` for
programs).  `stepkeeper run --dry-run -- CMD` shows what would be started.  Neither needs Slurm.

The first of these that sets a key wins:

1. the command line: the setting's own option, or `--set KEY=VALUE`
2. the environment: `STEPKEEPER_...` at submission, or in the batch script; an empty variable sets nothing
3. `config.toml` in the run directory: read at the start of each attempt, so a change holds from the next one
4. `config.toml` in `~/.config/stepkeeper` (`$XDG_CONFIG_HOME/stepkeeper`)
5. `/etc/stepkeeper/config.toml`, the administrator's
6. the default

```toml
spares = 1
free_gib_min = 50

[policy]
failures_max = 5
```

Each of these ends the start with exit code 2.  The error names the file, the line and what is wanted:

- a key or a `STEPKEEPER_` variable that is not known
- a value of another kind or out of range
- a file that cannot be read
- a file that is neither yours nor root's
- a file that everybody may write (for the administrator's, also one that its group may write)

`attempts/attempt-000/config.json` of the run directory has the settings of an attempt.

## Locks

The administrator can lock keys.  A locked key that is set anywhere else, also to the same value, is an error.
The error names the file and the administrator's value.

```toml
# /etc/stepkeeper/config.toml
[locked]
free_gib_min = 100
policy.failures_max = 3
```

`locked = ["free_gib_min"]` locks what the file says outside `[locked]`, or the default.  It stands above all tables.

## How to read the entries

Each entry begins with its option, its variable, what is allowed, and the default.  A setting without an option is
set by `--set KEY=VALUE`.
""".strip()

_NO_SETTINGS = """
`STEPKEEPER_SOCKET`, `STEPKEEPER_RUN_ID`, `STEPKEEPER_ATTEMPT`, `STEPKEEPER_LAUNCH`, `STEPKEEPER_RESUME_FROM`,
`STEPKEEPER_RESUME_NEWEST`, `STEPKEEPER_RELEASE` and `STEPKEEPER_TASKS_PER_NODE` are what Stepkeeper passes to the
ranks; they set nothing.

Other limits are constants, each with its reason in `core/policy.py`.  A key of 0.1 that became a constant, or that
another key replaces, is an error which says so.
""".strip()


TOPICS: dict[str, tuple[str, ...]] = {
    "The ten that matter most": (
        "run_dir", "checkpoint_every", "retention", "notify_command", "policy.failures_max", "torchrun", "spares",
        "min_nodes", "local_tier", "policy.stop_signal",
    ),
    "Ranks and nodes": (
        "tasks_per_node", "micro_batches", "resume_argument", "same_code", "warm_standby", "warm_standby_imports",
        "policy.begin_within_s", "policy.grow_back", "policy.grow_idle_s", "policy.exclude_lost_for_s",
    ),
    "Checkpoints": (
        "verify_mib_per_s", "policy.choose_within_s", "policy.read_back", "local_keep",
        "snapshot_every", "snapshot_dir", "peer_copies", "peer_interface", "cold_tier", "cold_keep",
        "copy_rate", "framework", "checkpoint_dir",
        "repair_pointers",
    ),
    "Notices, time limit, stop": (
        "attach", "policy.save_margin_s", "policy.time_limit_margin", "policy.leave_within_s",
    ),
    "Failures": (
        *(key for key in SETTINGS if key.startswith(f"{GROUP}.on_")),
    ),
    "Hangs, losses, slow nodes": (
        "policy.hang_watch", "policy.hang_least_s", "policy.hang_most_s", "policy.loss_not_finite",
        "policy.loss_spike", "policy.skip_data_steps", "confirm_every", "policy.slow_node",
    ),
    "Storage and Slurm": (
        "free_gib_min", "group_readable", "slurm_client",
    ),
    "Log and metrics": (
        "log_format", "metrics_textfile", "metrics_port",
    ),
}  # fmt: skip
"""Every key, in the order of the page."""


def page() -> str:
    """Return the page."""
    out = ["# Configuration", "", MADE, "", _LEAD, ""]
    for topic, keys in TOPICS.items():
        out += [f"## {topic}", ""]
        for key in keys:
            out += _section(SETTINGS[key])
    return "\n".join([*out, "## What sets nothing", "", _NO_SETTINGS, ""])


def _section(setting: Setting) -> list[str]:
    default = f"`{shown(setting.default)}`" if setting.default is not None else shown(None)
    names = [f"`{name}`" for name in (setting.flag, setting.variable) if name]
    facts = " · ".join([*names, setting.wanted, f"default: {default}"])
    return [f"### `{setting.key}`", "", facts, "", linked(setting.help), ""]

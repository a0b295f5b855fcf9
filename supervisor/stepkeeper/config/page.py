"""`docs/configuration.md`, from the declarations."""

from __future__ import annotations

from stepkeeper.config.settings import GROUP, SETTINGS, Setting
from stepkeeper.config.values import shown

_LEAD = """
`stepkeeper run --print-config` shows every setting with its value, its unit and where it came from (`--json` for
programs), and `stepkeeper run --dry-run -- CMD` what would be started.  Neither needs Slurm.

The first of these that sets a key wins:

1. the command line: the setting's own option, or `--set KEY=VALUE`
2. the environment: `STEPKEEPER_...` at submission, or in the batch script; an empty variable sets nothing
3. `config.toml` in the run directory: read at the start of each attempt, so a change holds from the next one on
4. `config.toml` in `~/.config/stepkeeper` (`$XDG_CONFIG_HOME/stepkeeper`)
5. `/etc/stepkeeper/config.toml`, the administrator's
6. the default

```toml
spares = 1
free_gib_min = 50

[policy]
failures_max = 5
```

A key or a `STEPKEEPER_` variable that is not known, a value of another kind or out of range, a file that cannot be
read: each ends the start with exit code 2, and with the file, the line and what is wanted.  So does a file that
somebody else could have written: one that is neither yours nor root's, or that everybody may write (the
administrator's: its group, too).

By what an attempt went stands in `attempts/attempt-000/config.json` of the run directory.

## Locks

The administrator can lock keys.  A locked key that is set anywhere else, also to the same value, is an error which
names the file and the administrator's value.

```toml
# /etc/stepkeeper/config.toml
[locked]
free_gib_min = 100
policy.failures_max = 3
```

`locked = ["free_gib_min"]` locks what the file says outside `[locked]`, or the default.  It stands above all tables.
""".strip()

_TOLD = """
`STEPKEEPER_SOCKET`, `STEPKEEPER_RUN_ID`, `STEPKEEPER_ATTEMPT`, `STEPKEEPER_LAUNCH`, `STEPKEEPER_RESUME_FROM`,
`STEPKEEPER_RESUME_NEWEST` and `STEPKEEPER_TASKS_PER_NODE` are what Stepkeeper tells the ranks; they set nothing.
""".strip()


def page(made: str) -> str:
    """Return the page; `made` says from what."""
    own = [setting for setting in SETTINGS.values() if not setting.key.startswith(f"{GROUP}.")]
    policy = [setting for setting in SETTINGS.values() if setting.key.startswith(f"{GROUP}.")]
    out = ["# Configuration", "", made, "", _LEAD, "", "## Settings", "", *_table(own), "", _TOLD, ""]
    out += [
        f"## `[{GROUP}]`",
        "",
        "The limits that decisions go by.  The defaults suit most; each says what it is for.",
    ]
    out += ["", *_table(policy), ""]
    return "\n".join(out)


def _table(settings: list[Setting]) -> list[str]:
    rows = ["| key | default | allowed | option, variable | what it is for |", "|---|---|---|---|---|"]
    for setting in settings:
        names = ", ".join(f"`{name}`" for name in (setting.flag, setting.variable) if name)
        default = f"`{shown(setting.default)}`" if setting.default is not None else shown(None)
        text = setting.help.replace("|", "\\|")
        key = setting.key.removeprefix(f"{GROUP}.")
        rows.append(f"| `{key}` | {default} | {setting.wanted} | {names} | {text} |")
    return rows

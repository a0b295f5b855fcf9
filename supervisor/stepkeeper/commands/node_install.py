"""`stepkeeper node install` and `uninstall`: the agent's unit and configuration, put where systemd looks for them."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import stepkeeper
from stepkeeper import printing
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.node import ledger
from stepkeeper.node.config import DEFAULT_PATH
from stepkeeper_trainer.formats.durable import write_atomically

UNIT = "stepkeeper-node-agent.service"
UNIT_PATH = Path("/etc/systemd/system") / UNIT
STATE = Path("/var/lib/stepkeeper")
EXECUTABLE = "/opt/stepkeeper/bin/stepkeeper"  # as the unit's file has it
SYSTEMCTL_WITHIN_S = 60.0


def add(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the commands below `stepkeeper node`."""
    install = actions.add_parser(
        "install",
        help="put the agent's unit and configuration in place (root)",
        description=f"Write {UNIT_PATH}, with the path of this stepkeeper in it, and {DEFAULT_PATH} where there is "
        "none yet.  The agent is not started: read its configuration first.",
        allow_abbrev=False,
    )
    install.set_defaults(execute=run_install)
    uninstall = actions.add_parser(
        "uninstall",
        help="stop the agent and remove its unit (root)",
        description=f"Stop the agent and remove its unit.  {DEFAULT_PATH} and {STATE} stay, unless --purge is given.  "
        "A drain that the agent holds stays too: return the node yourself.",
        allow_abbrev=False,
    )
    uninstall.add_argument("--purge", action="store_true", help="remove configuration and ledger as well")
    uninstall.set_defaults(execute=run_uninstall)
    for command in (install, uninstall):
        command.add_argument("--dry-run", action="store_true", help="say what would be done, and change nothing")
        command.add_argument(
            "--root", type=Path, default=Path("/"), metavar="DIR", help="of the file system, such as an image of nodes"
        )


def packaged() -> Path:
    """Return the directory of unit, configuration and Slurm's hooks: of the package, or of the sources."""
    here = Path(stepkeeper.__file__).parent
    return here / "systemd" if (here / "systemd").is_dir() else here.parents[1] / "systemd"


def unit_text(executable: str) -> str:
    """Return the unit, for this installation."""
    return (packaged() / UNIT).read_text().replace(EXECUTABLE, executable)


@printing.reading
def run_install(arguments: argparse.Namespace) -> int:
    """Write the two files."""
    executable = Path(sys.executable).with_name("stepkeeper")
    if not executable.exists():
        raise StepkeeperError(f"{executable}: not there: install stepkeeper with pip into this Python", ExitCode.USAGE)
    unit, config = _below(arguments.root, UNIT_PATH), _below(arguments.root, DEFAULT_PATH)
    _refuse_not_root(arguments)
    _write(unit, unit_text(str(executable)), arguments)
    if os.path.lexists(config):
        printing.say(f"{config}: is there and stays as it is")
    else:
        _write(config, (packaged() / "node.toml").read_text(), arguments)
    _systemctl(arguments, "daemon-reload")
    hooks = packaged() / "slurm"
    printing.say(f"next: edit {config}; `stepkeeper node agent --check`; `systemctl enable --now {UNIT}`")
    printing.say(f"hooks for Slurm, optional: {hooks} (read its neighbour README.md)")
    return ExitCode.FINISHED


@printing.reading
def run_uninstall(arguments: argparse.Namespace) -> int:
    """Stop the agent, and remove what `install` wrote."""
    _refuse_not_root(arguments)
    unit, state = _below(arguments.root, UNIT_PATH), _below(arguments.root, STATE)
    held = _held(state / ledger.NAME)
    if os.path.lexists(unit):
        _systemctl(arguments, "disable", "--now", UNIT)
        _remove(unit, arguments)
        _systemctl(arguments, "daemon-reload")
    else:
        printing.say(f"{unit}: is not there")
    for path in (_below(arguments.root, DEFAULT_PATH), state):
        if arguments.purge and os.path.lexists(path):
            _remove(path, arguments)
        elif os.path.lexists(path):
            printing.say(f"{path}: stays; --purge removes it")
    if held:
        printing.say(f"the node stays drained: {held}; return it with `scontrol update NodeName=... State=RESUME`")
    return ExitCode.FINISHED


def _held(path: Path) -> str:
    try:
        drain = ledger.read(path).drain
    except OSError as error:
        return f"{path}: {error.strerror}: whether the agent holds a drain is not known"
    return drain.reason if drain is not None else ""


def _below(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def _refuse_not_root(arguments: argparse.Namespace) -> None:
    if not arguments.dry_run and os.geteuid() != 0:
        raise StepkeeperError("only root may do this; --dry-run shows what would be done", ExitCode.USAGE)


def _write(path: Path, text: str, arguments: argparse.Namespace) -> None:
    if arguments.dry_run:
        printing.say(f"would write {path}:")
        printing.say(text.rstrip("\n"))
        return
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_atomically(path, text.encode(), mode=0o644)
    except OSError as error:
        raise StepkeeperError(f"{path}: {error.strerror}", ExitCode.USAGE) from error
    printing.say(f"wrote {path}")


def _remove(path: Path, arguments: argparse.Namespace) -> None:
    if arguments.dry_run:
        printing.say(f"would remove {path}")
        return
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        raise StepkeeperError(f"{path}: {error.strerror}", ExitCode.USAGE) from error
    printing.say(f"removed {path}")


def _systemctl(arguments: argparse.Namespace, *words: str) -> None:
    """Have systemd do something, on a running system that has it."""
    line = f"systemctl {' '.join(words)}"
    if arguments.root != Path("/"):
        return
    if arguments.dry_run:
        printing.say(f"would run: {line}")
        return
    try:
        done = subprocess.run(
            ["systemctl", *words], capture_output=True, text=True, timeout=SYSTEMCTL_WITHIN_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        printing.say(f"{line}: not done: {error}")
        return
    if done.returncode:
        printing.say(f"{line}: exit code {done.returncode}: {done.stderr.strip()}")

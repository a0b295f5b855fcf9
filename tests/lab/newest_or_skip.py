"""`python -m tests.lab.newest_or_skip COMMAND...`: build the newest Slurm where that has not been done, become COMMAND.

Where it cannot be built, say so loudly, and end with 0.
"""

import os
import sys

from tests.lab.newest import UnavailableError, newest


def main(command: list[str]) -> int:
    """Build, then become the command."""
    try:
        built = newest()
    except UnavailableError as error:
        line = "=" * 100
        sys.stderr.write(
            f"{line}\nSKIPPED: NOTHING WAS TESTED ON THE NEWEST SLURM, which cannot be built here:\n{error}\n{line}\n"
        )
        return 0
    sys.stderr.write(f"the newest Slurm: {(built.directory / 'version').read_text().strip()} in {built.directory}\n")
    if command:
        os.execvp(command[0], command)  # noqa: S606 - the command is the developer's
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

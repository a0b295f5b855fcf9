"""`__main__` of the single file: unpack the installation once, then become its command.

Compiled dependencies cannot be imported from an archive.  Any Python from 3.10 on can read this.
"""

import os
import shutil
import sys
import tempfile
import zipfile

DIGEST = "@DIGEST@"  # of what is packed
OLDEST, BEYOND = (3, 11), (3, 14)


def main() -> None:
    """Unpack, and start."""
    if not OLDEST <= sys.version_info[:2] < BEYOND:
        found = ".".join(map(str, sys.version_info[:3]))
        sys.exit(f"stepkeeper: {sys.executable} is Python {found}: start this file with Python 3.11, 3.12 or 3.13")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    version = "{}.{}".format(*sys.version_info)
    home = os.path.join(os.path.abspath(cache), "stepkeeper", f"{DIGEST}-{version}")
    if not os.path.isdir(home):
        unpack(home)
    python = os.path.join(home, "bin", "python3")
    os.execv(python, [python, os.path.join(home, "bin", "stepkeeper"), *sys.argv[1:]])  # noqa: S606


def unpack(home: str) -> None:
    """Make the installation in one rename: others may be starting too."""
    made = None
    try:
        os.makedirs(os.path.dirname(home), mode=0o700, exist_ok=True)
        made = tempfile.mkdtemp(dir=os.path.dirname(home))
        with zipfile.ZipFile(os.path.abspath(sys.argv[0])) as packed:
            packed.extractall(made, [name for name in packed.namelist() if name.startswith("lib/")])
        version = "{}.{}".format(*sys.version_info)
        os.rename(os.path.join(made, "lib", "python3"), os.path.join(made, "lib", f"python{version}"))
        interpreter = os.path.realpath(sys.executable)
        os.mkdir(os.path.join(made, "bin"))
        os.symlink(interpreter, os.path.join(made, "bin", "python3"))
        write(made, "pyvenv.cfg", f"home = {os.path.dirname(interpreter)}\ninclude-system-site-packages = false\n")
        write(made, "bin/stepkeeper", f"#!{home}/bin/python3\n{COMMAND}")
        os.chmod(os.path.join(made, "bin", "stepkeeper"), 0o700)
        os.rename(made, home)
    except OSError as error:
        if made:
            shutil.rmtree(made, ignore_errors=True)
        if not os.path.isdir(home):  # another process was faster
            sys.exit(f"stepkeeper: cannot unpack into {home}: {error}: set XDG_CACHE_HOME to a place with room")


def write(directory: str, name: str, text: str) -> None:
    """Write one small file."""
    with open(os.path.join(directory, name), "w", encoding="utf-8") as file:
        file.write(text)


COMMAND = """import sys

from stepkeeper.entry import main

sys.exit(main())
"""

if __name__ == "__main__":
    main()

"""check.py ROOT: names of modules that are not there, and modules that cannot be imported alone."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import layout_table as table
from lib import module_name, read, tracked

ROOT = Path(sys.argv[1]).resolve()
NEVER = ("tests/fixtures/", "CHANGELOG.md", "tests/durations.txt")


def main() -> int:
    bad = 0
    files = tracked(ROOT)
    modules = {name for path in files if (name := module_name(path)) and (ROOT / path).exists()}
    packages = {m.rpartition(".")[0] for m in modules} | {"stepkeeper"}
    paths = {path.removeprefix("supervisor/stepkeeper/") for path in files if path.startswith("supervisor/stepkeeper/")}
    old_folders = {o.replace(".", "/") for o in table.PACKAGES} - {o.replace(".", "/") for o in [*packages]}
    tops = {m.split(".")[1] for m in modules if "." in m}
    gone = {o.split(".")[0] for o in table.PACKAGES} - tops
    for path in files:
        if path.startswith(NEVER):
            continue
        text = read(ROOT / path)
        if text is None:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            for match in re.finditer(r"(?<![\w/.-])stepkeeper\.([a-z_0-9]+(?:\.[a-zA-Z_0-9]+)*)", line):
                words = match[0].split(".")
                known = any(".".join(words[:n]) in modules for n in range(2, len(words) + 1))
                if not known and not re.match(r"stepkeeper\.(sbatch|step|save_id|service|core\.\{|example)", match[0]):
                    print(f"{path}:{number}: {match[0]}")
                    bad += 1
            for match in re.finditer(r"(?<![\w/.-])(?:supervisor/)?(?:stepkeeper/)?((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)\b", line):
                first = match[1].split("/")[0]
                if (first in gone or first in tops) and match[1] not in paths and not (ROOT / match[0]).exists():
                    print(f"{path}:{number}: {match[0]}")
                    bad += 1
            for match in re.finditer(r"`([a-z_]+(?:\.[a-zA-Z_]+)+)[`(]", line):
                if match[1].split(".")[0] in gone and not any(f".{'.'.join(match[1].split('.')[:n])}" in f".{m}"[-len('.'.join(match[1].split('.')[:n])) - 1 :] for m in modules for n in (2, 3)) and not match[1].startswith(("node.toml", "report.html")):
                    print(f"{path}:{number}: `{match[1]}`")
                    bad += 1
    script = (
        "import importlib, sys, os\n"
        "names = sys.argv[1:]\n"
        "code = 0\n"
        "for name in names:\n"
        "    pid = os.fork()\n"
        "    if not pid:\n"
        "        try:\n"
        "            importlib.import_module(name)\n"
        "        except BaseException as error:\n"
        "            print(name, type(error).__name__, error); sys.stdout.flush(); os._exit(1)\n"
        "        os._exit(0)\n"
        "    code |= os.waitpid(pid, 0)[1]\n"
        "sys.exit(bool(code))\n"
    )
    python = ROOT / ".venv/bin/python"
    done = subprocess.run(
        [str(python), "-c", script, *sorted(m for m in modules if not m.endswith("__main__"))],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.stdout:
        kinds: dict[str, list[str]] = {}
        for line in done.stdout.splitlines():
            name, _, error = line.partition(" ")
            kinds.setdefault(error, []).append(name)
        for error, names in kinds.items():
            print(f"{len(names)} cannot be imported ({', '.join(names[:3])}): {error}")
        bad += len(done.stdout.splitlines())
    sizes = sorted(((len((read(ROOT / p) or "").splitlines()), p) for p in files if module_name(p) and (ROOT / p).exists()), reverse=True)
    for size, path in sizes:
        if size > 450:
            print(f"{path}: {size} lines")
    small = [(s, p) for s, p in sizes if s < 60 and not p.endswith("__init__.py")]
    print(f"{len(sizes)} modules; below 60 lines: " + ", ".join(f"{p.removeprefix('supervisor/stepkeeper/')} {s}" for s, p in small))
    print(f"{bad} findings")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())

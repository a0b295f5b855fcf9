"""`python packages/build.py WHEEL OUT`: the Debian package and the RPM of the node agent, the single file, the SBOM.

All hold one installation, laid out as a virtual environment: the wheel and its pinned dependencies, compiled ones for
each Python that Stepkeeper supports.  Debian 12 and RHEL 9 lack some of the dependencies, or have older ones.  torch is
not among them: only ranks need it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from onefile import COMMAND  # noqa: E402 - beside this file

NAME = "stepkeeper-node-agent"
UNIT = f"{NAME}.service"
HOME = "/usr/lib/stepkeeper"
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = ("manylinux_2_17_x86_64", "manylinux2014_x86_64")
SOURCE_ONLY = "sdnotify"  # publishes no wheel
MAINTAINER = "The Stepkeeper maintainers"
SUMMARY = "Stepkeeper's node agent and command: drains nodes whose GPUs fail"
ABOUT = (
    "The node agent reads the kernel log and NVML, and drains its own node in Slurm where a GPU has failed. It only "
    'observes until its configuration says mode = "act". The command stepkeeper keeps trainings alive in Slurm jobs.'
)


def main() -> int:
    """Build what can be built here; name the rest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    version = given.wheel.name.split("-")[1]
    given.out.mkdir(parents=True, exist_ok=True)
    os.umask(0o022)
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        packages = installation(given.wheel, work)
        bom = sbom(packages, work, given.out / f"stepkeeper-{version}.cdx.json")
        made = [bom, onefile(packages, given.out / f"stepkeeper-{version}.pyz")]
        root = file_system(packages, bom, work / "root")
        for tool, build in (("dpkg-deb", deb), ("rpmbuild", rpm)):
            if shutil.which(tool):
                made.append(build(root, version, work, given.out))
            else:
                sys.stderr.write(f"{tool} is not installed: the package that it makes is left out\n")
    for path in made:
        sys.stdout.write(f"{path}\n")
    return 0


def installation(wheel: Path, work: Path) -> Path:
    """Return a directory of the wheel and its dependencies, for every Python of `PYTHONS`."""
    target = work / "packages"
    pinned = (HERE / "requirements.txt").read_text()
    lines = re.sub(r"^#.*\n", "", pinned, flags=re.MULTILINE).replace("\\\n", "").splitlines()
    pure, source = work / "pure.txt", work / "source.txt"
    pure.write_text("\n".join(line for line in lines if not line.startswith(SOURCE_ONLY)))
    source.write_text("\n".join(line for line in lines if line.startswith(SOURCE_ONLY)))
    for python in PYTHONS:
        of_python = ["--python-version", python, "--implementation", "cp", "--only-binary", ":all:"]
        of_platform = [word for platform in PLATFORMS for word in ("--platform", platform)]
        one = work / python
        pip("install", "--target", one, *of_python, *of_platform, "--require-hashes", "-r", pure)
        shutil.copytree(one, target, dirs_exist_ok=True)  # compiled modules have the Python in their names
    pip("install", "--target", work / "source", "--require-hashes", "-r", source)
    pip("install", "--target", work / "own", wheel)
    for part in (work / "source", work / "own"):
        shutil.copytree(part, target, dirs_exist_ok=True)
    for left in [target / "bin", *target.rglob("__pycache__")]:
        shutil.rmtree(left, ignore_errors=True)
    for record in target.glob("*.dist-info/direct_url.json"):
        record.unlink()  # a path of the machine that built it
    return target


def pip(*words: str | Path) -> None:
    """Run this Python's pip on exactly what is named."""
    quiet = ("--quiet", "--quiet", "--no-deps", "--no-compile", "--no-warn-conflicts")
    command, *rest = words
    subprocess.run([sys.executable, "-m", "pip", command, *quiet, *rest], check=True)


def file_system(packages: Path, bom: Path, root: Path) -> Path:
    """Lay out the files of the packages below `root`."""
    home = root / HOME.lstrip("/")
    site = home / "lib" / f"python{PYTHONS[0]}" / "site-packages"
    shutil.copytree(packages, site)
    for other in PYTHONS[1:]:
        (home / "lib" / f"python{other}").symlink_to(f"python{PYTHONS[0]}")
    put(home / "pyvenv.cfg", "home = /usr/bin\ninclude-system-site-packages = false\n")
    put(home / "bin" / "stepkeeper", f"#!{HOME}/bin/python3\n{COMMAND}", mode=0o755)
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/stepkeeper").symlink_to("../lib/stepkeeper/bin/stepkeeper")
    shipped = site / "stepkeeper" / "systemd"
    unit = (shipped / UNIT).read_text().replace("/opt/stepkeeper/bin/", f"{HOME}/bin/")
    put(root / "usr/lib/systemd/system" / UNIT, unit.replace("/etc/systemd/system/", "/usr/lib/systemd/system/"))
    put(root / "etc/stepkeeper/node.toml", (shipped / "node.toml").read_text())
    for hook in sorted((shipped / "slurm").iterdir()):
        put(home / "slurm" / hook.name, hook.read_text(), mode=0o755)
    docs = root / "usr/share/doc" / NAME
    put(docs / "README.md", (shipped / "README.md").read_text())
    put(docs / "copyright", (HERE.parent / "LICENSE").read_text())
    put(docs / "sbom.cdx.json", bom.read_text())
    return root


def put(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file of the package."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def sbom(packages: Path, work: Path, out: Path) -> Path:
    """Write what the packages hold, as CycloneDX, read from the installed packages themselves."""
    environment = work / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    [site] = environment.glob("lib/python3*/site-packages")
    shutil.copytree(packages, site, dirs_exist_ok=True)
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--of", "JSON"]
    subprocess.run([*command, "-o", out, environment / "bin" / "python"], check=True)
    return out


def onefile(packages: Path, out: Path) -> Path:
    """Write one file that any Python of `PYTHONS` runs: `packages/onefile.py` with the installation behind it."""
    files = sorted(path for path in packages.rglob("*") if path.is_file())
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(packages)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    text = (HERE / "onefile.py").read_text().replace("@DIGEST@", digest.hexdigest()[:16])
    with out.open("wb") as file:
        file.write(b"#!/usr/bin/env python3\n")
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
            packed.writestr(zipfile.ZipInfo("__main__.py"), text)
            for path in files:
                entry = zipfile.ZipInfo(f"lib/python3/site-packages/{path.relative_to(packages)}")
                packed.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    out.chmod(0o755)
    return out


def deb(root: Path, version: str, work: Path, out: Path) -> Path:
    """Build the Debian package."""
    tree = work / "deb"
    shutil.copytree(root, tree, symlinks=True)
    (tree / HOME.lstrip("/") / "bin" / "python3").symlink_to("/usr/bin/python3")
    size = sum(path.lstat().st_size for path in tree.rglob("*") if path.is_file()) // 1024
    about = "\n".join(f" {line}" for line in textwrap.wrap(ABOUT, 76))
    after_last = f"3.{int(PYTHONS[-1].split('.')[1]) + 1}"
    put(
        tree / "DEBIAN/control",
        f"Package: {NAME}\nVersion: {version_of_package(version)}\nArchitecture: amd64\nMaintainer: {MAINTAINER}\n"
        f"Section: admin\nPriority: optional\nInstalled-Size: {size}\n"
        f"Depends: python3 (>= {PYTHONS[0]}), python3 (<< {after_last}~), libc6 (>= 2.28)\nSuggests: slurmd, munge\n"
        f"Description: {SUMMARY}\n{about}\n",
    )
    put(tree / "DEBIAN/conffiles", "/etc/stepkeeper/node.toml\n")
    for script in sorted((HERE / "deb").iterdir()):
        put(tree / "DEBIAN" / script.name, script.read_text(), mode=0o755)
    made = out / f"{NAME}_{version_of_package(version)}_amd64.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Zxz", "--build", tree, made], check=True, stdout=sys.stderr)
    return made


def rpm(root: Path, version: str, work: Path, out: Path) -> Path:
    """Build the RPM."""
    top = work / "rpm"
    files = "\n".join(listed(root))
    known = {
        "version": version_of_package(version),
        "summary": SUMMARY,
        "about": ABOUT,
        "pythons": " or ".join(f"python{python}" for python in reversed(PYTHONS)),
        "python_files": " ".join(f"/usr/bin/python{python}" for python in reversed(PYTHONS)),
        "root": str(root),
        "files": files,
    }
    text = re.sub(r"@(\w+)@", lambda found: known[found[1]], (HERE / f"{NAME}.spec").read_text())
    put(top / f"{NAME}.spec", text)
    command = ["rpmbuild", "-bb", "--quiet", "--define", f"_topdir {top}", "--define", "_build_id_links none"]
    subprocess.run([*command, top / f"{NAME}.spec"], check=True, stdout=sys.stderr)
    [made] = top.glob("RPMS/*/*.rpm")
    return Path(shutil.copy(made, out))


def listed(root: Path) -> list[str]:
    """Return the `%files` of the RPM: directories of ours, and files."""
    lines = []
    for path in sorted(root.rglob("*")):
        name = f"/{path.relative_to(root)}"
        if path.is_dir() and not path.is_symlink():
            if name.startswith((HOME, "/etc/stepkeeper", "/usr/share/doc/")):
                lines.append(f'%dir "{name}"')
        elif name.startswith("/etc/"):
            lines.append(f'%config(noreplace) "{name}"')
        else:
            mode = stat.S_IMODE(path.lstat().st_mode)
            lines.append(f'"{name}"' if path.is_symlink() else f'%attr({mode:o}, root, root) "{name}"')
    return lines


def version_of_package(version: str) -> str:
    """Return a version as dpkg and rpm order it: development versions before their release."""
    return re.sub(r"\.?(dev|a|b|rc)(\d+)", r"~\1\2", version)


if __name__ == "__main__":
    sys.exit(main())

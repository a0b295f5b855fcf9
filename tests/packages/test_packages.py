"""`make dist`, and what it makes is installed, upgraded and removed in a clean Debian root.

The RPM is played by Debian's rpm in that root too: its scripts, files and dependency are real, the distribution is not.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email import message_from_string
from pathlib import Path

import pytest

from tests.packages import building
from tests.packages.building import files_of, need, run

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(1200)]

OLD, NEW = "0.9.0", "1.0.0"
UNIT = "usr/lib/systemd/system/stepkeeper-node-agent.service"
HOME = "usr/lib/stepkeeper"
SETTINGS = "etc/stepkeeper/node.toml"
LEDGER = "var/lib/stepkeeper/incidents.jsonl"
NOBODY = "--userspec=65534:65534"
HELD = {"msgspec", "nvidia-ml-py", "prometheus-client", "sdnotify", "shtab", "stepkeeper", "structlog", "xxhash"}
LINK = re.compile(r"\]\(([^()\s]*)\)")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What `make dist` makes of two releases, from a tree without git."""
    building.environment()
    need("dpkg-deb")
    place = tmp_path_factory.mktemp("dist")
    sources = building.copy_of_sources(place / "sources")
    return {version: building.make_dist(sources, place / version, version) for version in (OLD, NEW)}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("root")
    place.chmod(0o755)
    yield building.debian_root(place)
    shutil.rmtree(place)


def inside(root: Path, *command: str, user: str = "--userspec=0:0", code: int = 0) -> str:
    return run(
        "chroot",
        user,
        root,
        "/usr/bin/env",
        "-i",
        "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL=C",
        *command,
        code=code,
    )


def one(directory: Path, pattern: str) -> Path:
    [found] = directory.glob(pattern)
    return found


def works(root: Path, version: str) -> None:
    """The command, the agent's own check, the unit and the hooks of an installation."""
    assert inside(root, "stepkeeper", "--version", user=NOBODY).strip() == f"stepkeeper {version}"
    assert "79" in inside(root, "stepkeeper", "xid", "79", user=NOBODY)
    checked = inside(root, f"/{HOME}/bin/stepkeeper", "node", "agent", "--check", code=42)  # no Slurm in this root
    assert "Traceback" not in checked
    assert "slurm" in checked.lower()
    unit = (root / UNIT).read_text()
    [start] = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    program = start.removeprefix("ExecStart=").split()[0]
    assert program == f"/{HOME}/bin/stepkeeper"
    inside(root, "test", "-x", program)
    for hook in ("prolog", "epilog", "health", "verdict"):
        inside(root, f"/{HOME}/slurm/{hook}.sh", user=NOBODY)
    settings = (root / SETTINGS).stat()
    assert (settings.st_uid, stat.S_IMODE(settings.st_mode)) == (0, 0o644)
    assert list((root / HOME).rglob("__pycache__")), "an agent that may not write would compile at each start"


def change_settings(root: Path) -> None:
    """What an administrator and a running agent leave."""
    path = root / SETTINGS
    path.write_text(path.read_text().replace("expected_gpus = 0", "expected_gpus = 8"))
    (root / LEDGER).parent.mkdir(mode=0o700)
    (root / LEDGER).write_text("")


def test_debian_package_is_installed_upgraded_removed_and_purged(root: Path, made: dict[str, Path]) -> None:
    before = files_of(root)
    for version in (OLD, NEW):
        shutil.copy(one(made[version], "*.deb"), root / "tmp" / f"{version}.deb")

    inside(root, "dpkg", "--install", f"/tmp/{OLD}.deb")
    works(root, OLD)
    assert inside(root, "dpkg", "--verify", "stepkeeper-node-agent") == ""
    change_settings(root)
    inside(root, "dpkg", "--install", f"/tmp/{NEW}.deb")  # ends with an error where it would ask about settings
    works(root, NEW)
    assert "expected_gpus = 8" in (root / SETTINGS).read_text()
    assert len(list((root / HOME).glob("lib/python3.11/site-packages/stepkeeper-*"))) == 1

    inside(root, "dpkg", "--remove", "stepkeeper-node-agent")
    assert files_of(root) - before == {"etc/stepkeeper", SETTINGS, "var/lib/stepkeeper", LEDGER}
    inside(root, "dpkg", "--purge", "stepkeeper-node-agent")
    assert files_of(root) == before


def test_debian_package_of_a_site_that_installed_with_pip_names_the_unit_in_its_way(
    root: Path, made: dict[str, Path]
) -> None:
    hiding = root / "etc/systemd/system/stepkeeper-node-agent.service"
    hiding.parent.mkdir(parents=True, exist_ok=True)
    hiding.write_text("")
    shutil.copy(one(made[NEW], "*.deb"), root / "tmp/new.deb")
    try:
        assert "hides the unit of this package" in inside(root, "dpkg", "--install", "/tmp/new.deb")
    finally:
        inside(root, "dpkg", "--purge", "stepkeeper-node-agent")
        hiding.unlink()


def test_rpm_is_installed_upgraded_and_erased(root: Path, made: dict[str, Path], tmp_path: Path) -> None:
    need("rpm", "rpmbuild")
    rpm = ("rpm", "--root", str(root))
    old, new = (one(made[version], "*.rpm") for version in (OLD, NEW))
    run(*rpm, "--initdb")
    before = files_of(root)
    assert "python3.11" in run(*rpm, "--install", old, code=1)  # rpm's own database knows of no Python here
    run(*rpm, "--install", provider(tmp_path))

    run(*rpm, "--install", old)
    works(root, OLD)
    change_settings(root)
    run(*rpm, "--upgrade", new)
    works(root, NEW)
    assert "expected_gpus = 8" in (root / SETTINGS).read_text()
    assert len(list((root / HOME).glob("lib/python3.11/site-packages/stepkeeper-*"))) == 1

    run(*rpm, "--erase", "stepkeeper-node-agent")
    assert files_of(root) - before == {"etc/stepkeeper", f"{SETTINGS}.rpmsave", "var/lib/stepkeeper", LEDGER}
    shutil.rmtree(root / "etc/stepkeeper")
    shutil.rmtree(root / "var/lib/stepkeeper")


def provider(place: Path) -> Path:
    """Return a package that says what Debian's Python and shell give, to rpm's own database."""
    (place / "python.spec").write_text(
        "Name: debian-python\nVersion: 3.11\nRelease: 1\nSummary: of the root\nLicense: none\nBuildArch: noarch\n"
        "Provides: python3.11 /bin/sh\n%description\nOf the root.\n%files\n"
    )
    run("rpmbuild", "-bb", "--quiet", "--define", f"_topdir {place}", place / "python.spec")
    return one(place, "RPMS/noarch/*.rpm")


def test_the_unit_is_one_that_systemd_takes(made: dict[str, Path], tmp_path: Path) -> None:
    need("systemd-analyze")
    run("dpkg-deb", "--extract", one(made[NEW], "*.deb"), tmp_path)
    unit = tmp_path / UNIT
    unit.write_text(unit.read_text().replace(f"/{HOME}/bin/stepkeeper", sys.executable))
    said = run("systemd-analyze", "verify", unit)
    assert UNIT not in said


def test_the_single_file_runs_without_pip_and_unpacks_once(root: Path, made: dict[str, Path]) -> None:
    file = root / "tmp/stepkeeper.pyz"
    shutil.copy(one(made[NEW], "*.pyz"), file)
    place = root / "tmp/home"
    place.mkdir()
    os.chown(place, 65534, 65534)
    command = ("HOME=/tmp/home", "/tmp/stepkeeper.pyz")

    assert inside(root, *command, "--version", user=NOBODY).strip() == f"stepkeeper {NEW}"
    [unpacked] = (place / ".cache/stepkeeper").iterdir()
    marked = unpacked / "marked"
    marked.write_text("")
    assert "79" in inside(root, *command, "xid", "79", user=NOBODY)
    assert marked.exists(), "unpacked again"
    assert "no command `stats`" in inside(root, *command, "stats", user=NOBODY, code=2)
    shutil.rmtree(place)
    assert "set XDG_CACHE_HOME" in inside(root, "XDG_CACHE_HOME=/proc", *command, "--version", user=NOBODY, code=1)


def test_wheel_and_sdist_say_what_an_index_needs(made: dict[str, Path]) -> None:
    with zipfile.ZipFile(one(made[NEW], "*.whl")) as wheel:
        names = set(wheel.namelist())
        told = message_from_string(wheel.read(f"stepkeeper-{NEW}.dist-info/METADATA").decode())
    assert {"stepkeeper/py.typed", "stepkeeper_trainer/py.typed", "stepkeeper/systemd/node.toml"} <= names
    assert f"stepkeeper-{NEW}.dist-info/licenses/LICENSE" in names
    assert told["License-Expression"] == "Apache-2.0"
    text = str(told.get_payload())
    assert "## What survives" in text
    assert LINK.findall(text) == [], "links that lead nowhere: no public repository is named"
    with tarfile.open(one(made[NEW], "*.tar.gz")) as sdist:
        held = sdist.getnames()
    assert f"stepkeeper-{NEW}/packages/build.py" in held
    assert not [name for name in held if "/.venv" in name or "/build/" in name]


def test_a_wheel_of_the_sdist_is_the_same(made: dict[str, Path], tmp_path: Path) -> None:
    """The sdist carries its version: nobody pretends one."""
    python = building.environment()
    run(
        python,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        one(made[NEW], "*.tar.gz"),
    )

    def content(path: Path) -> dict[str, bytes]:
        with zipfile.ZipFile(path) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}

    assert content(one(tmp_path, "*.whl")) == content(one(made[NEW], "*.whl"))


def test_with_a_repository_the_metadata_has_urls_and_absolute_links(tmp_path: Path) -> None:
    sources = building.copy_of_sources(tmp_path / "sources")
    project = sources / "pyproject.toml"
    project.write_text(project.read_text().replace('repository = ""', 'repository = "https://example.org/stepkeeper"'))
    run(building.environment(), "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=sources)

    with zipfile.ZipFile(one(tmp_path, "*.whl")) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith("/METADATA")]
        told = message_from_string(wheel.read(name).decode())
    assert "Changelog, https://example.org/stepkeeper/blob/HEAD/CHANGELOG.md" in told.get_all("Project-URL", [])
    targets = LINK.findall(str(told.get_payload()))
    assert len(targets) > 10
    assert all(target.startswith("https://example.org/stepkeeper/") for target in targets)


def test_the_bill_of_materials_names_what_the_packages_hold(made: dict[str, Path]) -> None:
    bom = json.loads(one(made[NEW], "*.cdx.json").read_text())

    assert bom["bomFormat"] == "CycloneDX"
    versions = {part["name"].replace("_", "-"): part["version"] for part in bom["components"]}
    assert set(versions) == HELD
    assert versions["stepkeeper"] == NEW
    assert all(part.get("licenses") for part in bom["components"])
    packaged = subprocess.run(
        ["dpkg-deb", "--fsys-tarfile", one(made[NEW], "*.deb")], capture_output=True, check=True, timeout=60
    ).stdout
    for name in HELD:
        assert f"site-packages/{name.replace('-', '_')}-{versions[name]}.dist-info".encode() in packaged, name

"""The hook that `--attach` puts at the start of each Python stands in nobody's way, and says why it does nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepkeeper.watcher.ranks import RankSocket
from stepkeeper_trainer.formats.messages import Hello
from stepkeeper_trainer.integrations import hook

SITE = Path(hook.__file__).parent / "site"
WITHIN_S = 60.0
WAITING = "any(type(each).__name__ == '_Waiting' for each in sys.meta_path)"


def run(code: str, *behind: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the hook before what the user has on PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("STEPKEEPER_", "SLURM_"))}
    environment |= {"PYTHONPATH": ":".join(map(str, [SITE, *behind])), hook.VARIABLE: "auto", **variables}
    command = [sys.executable, "-c", f"import sys; {code}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert done.returncode == 0, done.stderr
    return done


def framework(at: Path, version: str, body: str) -> Path:
    """Make what looks like transformers when it is imported."""
    (at / "transformers").mkdir(parents=True)
    (at / "transformers/__init__.py").touch()
    (at / "transformers/trainer.py").write_text(body)
    (at / f"transformers-{version}.dist-info").mkdir()
    (at / f"transformers-{version}.dist-info/METADATA").write_text(f"Name: transformers\nVersion: {version}\n")
    return at


def test_the_sitecustomize_behind_it_is_loaded_as_ever(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('theirs')\nmark = 7\n")
    done = run(f"import sitecustomize; print(sitecustomize.mark, {str(SITE)!r} in sys.path, {WAITING})", tmp_path)

    assert done.stdout.split() == ["theirs", "7", "False", "True"]
    assert done.stderr == ""


def test_without_another_one_there_is_none() -> None:
    done = run(f"print('sitecustomize' in sys.modules, {WAITING})")

    assert (done.stdout.split(), done.stderr) == (["False", "True"], "")


def test_an_error_of_the_one_behind_it_is_theirs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('theirs')\n")
    done = run("print(1)", tmp_path)

    assert "Error in sitecustomize" in done.stderr
    assert "ValueError: theirs" in done.stderr


@pytest.mark.parametrize("variables", [{hook.VARIABLE: "off"}, {hook.VARIABLE: ""}, {hook.ATTACHED_VARIABLE: "1"}])
def test_where_it_is_off_and_in_what_a_rank_starts_it_waits_for_nothing(variables: dict[str, str]) -> None:
    assert run(f"print({WAITING})", **variables).stdout.split() == ["False"]


@pytest.mark.parametrize(
    ("version", "body", "why"),
    [
        ("99.0.1", "class Trainer: pass\n", "this release knows transformers from 4.46 to before 6 only"),
        ("4.2", "class Trainer: pass\n", "this release knows transformers from 4.46 to before 6 only"),
        ("5.1", "class Other: pass\n", "Error"),  # what our own file imports of it is not there
    ],
)
def test_what_it_cannot_attach_to_is_imported_as_ever_and_said_once_by_rank_0(
    version: str, body: str, why: str, tmp_path: Path
) -> None:
    there = framework(tmp_path, version, body)
    socket = RankSocket(f"@{tmp_path.name}-{os.getpid()}")
    heard = {
        "STEPKEEPER_SOCKET": f"@{tmp_path.name}-{os.getpid()}",
        "STEPKEEPER_ATTEMPT": "1",
        "STEPKEEPER_LAUNCH": "2",
    }
    code = "import transformers.trainer; import importlib; importlib.reload(transformers.trainer); print('goes on')"

    first, second = (run(code, there, RANK=rank, **heard) for rank in "01")

    assert (first.stdout, second.stdout, second.stderr) == ("goes on\n", "goes on\n", "")
    [line] = first.stderr.splitlines()
    assert line.startswith(f"stepkeeper: not attached to transformers {version}: ")
    assert why in line
    received = socket.receive()
    assert received is not None
    hello = received[0]
    assert isinstance(hello, Hello)
    assert (hello.launch, hello.framework) == ("1.2", f"transformers {version}")
    assert why in hello.unable
    assert socket.receive() is None
    socket.close()


def test_what_an_attached_framework_imports_later_is_no_news(tmp_path: Path) -> None:
    there = framework(tmp_path, "99.0", "class Trainer: pass\n")
    attached = f"import os; os.environ[{hook.ATTACHED_VARIABLE!r}] = str(os.getpid()); import transformers.trainer"

    assert run(attached, there, RANK="0").stderr == ""


def test_only_the_named_framework_is_waited_for(tmp_path: Path) -> None:
    there = framework(tmp_path, "99.0", "class Trainer: pass\n")

    done = run("import transformers.trainer", there, RANK="0", **{hook.VARIABLE: "lightning"})

    assert done.stderr == ""


def test_our_packages_are_lent_to_a_python_of_the_same_version_and_nothing_else_is(tmp_path: Path) -> None:
    for name in ("msgspec", "structlog"):
        (tmp_path / "ours" / name).mkdir(parents=True)
        (tmp_path / "ours" / name / "__init__.py").write_text("lent = True\n")
    code = (
        f"sys.path[:] = [each for each in sys.path if 'site-packages' not in each]; sys.path.append({str(ROOT)!r})\n"
        "from stepkeeper_trainer.integrations import hook\n"
        "hook._lend_packages()\n"
        "import msgspec; print(msgspec.lent)\n"
        "import importlib.util; print(importlib.util.find_spec('structlog'))"
    )
    done = run(code, **{hook.PACKAGES_VARIABLE: f"{sys.implementation.cache_tag}:{tmp_path / 'ours'}"})
    other = f"{sys.implementation.cache_tag}0:{tmp_path / 'ours'}"
    refused = run(
        code.replace("print(msgspec.lent)", "").replace("import msgspec; ", ""), **{hook.PACKAGES_VARIABLE: other}
    )

    assert done.stdout.split() == ["True", "None"]
    assert refused.stdout.split() == ["None"]


ROOT = Path(hook.__file__).parents[2]

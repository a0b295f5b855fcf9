"""Training in another world than the supervisor: a container, an environment that a batch script sets up."""

import ast
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stepkeeper.core import events as on
from tests.lab import Lab, requirements
from tests.lab.site import supervisor_python
from tests.stories import acts
from tests.training import SMALL, Training, assert_complete

pytestmark = [pytest.mark.slurm, pytest.mark.campaign]
# what a container has of its own: /run, /dev, processes, IPC; and no Slurm
CONTAINER = (
    "bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/run", "--unshare-pid",
    "--unshare-ipc", "--unshare-uts", "--hostname", "container",
)  # fmt: skip
SLURM = ("scontrol", "srun", "squeue", "scancel", "sbatch")


INSTALL_S = 300.0
MODULES = (Path("/usr/share/lmod/lmod/init/bash"), Path("/usr/share/modules/init/bash"))  # Lmod, Environment Modules
# of an interpreter: itself, and where its packages are
PLACES = """
import os, sys, stepkeeper, stepkeeper_trainer
mine = [os.path.dirname(os.path.dirname(each.__file__)) for each in (stepkeeper, stepkeeper_trainer)]
print(*filter(os.path.isdir, [sys.base_prefix, sys.prefix, *sys.path, *mine]), sep="\\n")
"""
SCRIPT = ("-m", "stepkeeper_trainer.examples.train_lm", "--steps=40", "--seed=7", "--checkpoint-every-steps=10",
          "--step-seconds-min=0.3", *SMALL)  # fmt: skip


def need(command: str, package: str) -> None:
    """Skip where a program is not installed."""
    if shutil.which(command) is None:
        pytest.skip(f"no {command} here: apt-get install {package}")


def need_namespaces(training: Training) -> None:
    """Skip where the kernel lets an ordinary user start no container."""
    line = ("unshare", "--user", "--map-root-user", "--mount", "true")
    done = training.lab.run(*line, user=training.user, check=False)
    if done.returncode:
        pytest.skip(f"no user namespaces for an ordinary user here: {done.stderr.strip()}")


def bubblewrap(training: Training) -> list[str]:
    """A container with processes, IPC, /run and /dev of its own, in which Slurm's commands are not."""
    if shutil.which("bwrap") is None and requirements.required():
        pytest.fail("no bwrap: apt-get install bubblewrap")
    need("bwrap", "bubblewrap")
    need_namespaces(training)
    hidden = [word for name in SLURM if (path := shutil.which(name)) for word in ("--ro-bind", "/dev/null", path)]
    return [*CONTAINER, *hidden, "--bind", str(training.work), str(training.work), "--"]


def charliecloud(training: Training) -> list[str]:
    """An image directory with programs of the host; of Slurm it has no configuration, no munge and no sockets."""
    need("ch-run", "charliecloud-runtime")
    need_namespaces(training)
    image = training.work / "image"
    asked = training.lab.run(training.python, "-c", PLACES, user=training.user).stdout.splitlines()
    bound = sorted({"/usr", str(training.work), *(path for path in asked if not path.startswith("/usr/"))})
    for place in ("etc", "dev", "proc", "sys", "tmp", "run", "home", *(path.lstrip("/") for path in bound)):
        (image / place).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "lib", "lib64"):
        (image / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group", "hosts", "resolv.conf"):
        (image / "etc" / name).touch()
    for path in (image, *image.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
    binds = [*((path, path) for path in bound), (image / "home", training.lab.place.conf.parent)]
    return ["ch-run", *(f"--bind={here}:{there}" for here, there in binds), f"--cd={training.work}", str(image), "--"]


def preempted(training: Training) -> None:
    """Preempt a running training once, long before its end, and wait for that."""
    training.wait_step(4)
    urgent = training.lab.preempt(training.job_id)
    training.lab.wait_job(urgent, "RUNNING")
    training.lab.release(urgent)
    training.wait_end()
    assert len(training.events(on.AttemptStarted)) == 2, training.story()
    assert training.events(on.RankHello), training.story()
    saved = [r.event for r in training.events(on.CheckpointCommitted) if isinstance(r.event, on.CheckpointCommitted)]
    assert any(event.emergency for event in saved), training.story()


@pytest.mark.parametrize("container", [bubblewrap, charliecloud])
def test_training_in_a_container_is_preempted_and_goes_on(
    lab: Lab, reference: Training, container: Callable[[Training], list[str]]
) -> None:
    """The supervisor and Slurm's commands outside, the library inside; the ranks' socket needs no mount."""
    name = container.__name__
    training = Training(lab, name=name, env={"STEPKEEPER": str(supervisor_python().parent / "stepkeeper")})
    training.command = (
        *container(training), "bash", "-c", 'echo "root: $(echo /*)"; ! timeout 2 scontrol show config && exec "$@"',
        "in-the-container", str(training.python), *SCRIPT,
    )  # fmt: skip
    training.submit()
    preempted(training)

    printed = "".join(path.read_text() for path in training.run_dir.glob("logs/*/*/*.log"))
    assert "root: /" in printed
    assert_complete(training, reference)


def batch(training: Training, *lines: str) -> None:
    """Submit a batch script of a user."""
    training.job_id = training.lab.submit(
        "\n".join(["#!/bin/bash", *lines, ""]),
        sbatch_args=[
            "-N2", "--ntasks-per-node=1", "--gres=gpu:1", "--mem=2000", "--cpus-per-task=1", "--requeue", "--no-kill",
            "--open-mode=append", f"--output={training.log}",
        ],
        user=training.user,
        env={"STEPKEEPER_RUN_DIR": str(training.run_dir)},
    )  # fmt: skip


def python_of(training: Training, directory: Path) -> None:
    """Put a `python` into a directory: that of the training."""
    directory.mkdir(parents=True)
    (directory / "python").write_text(f'#!/bin/sh\nexec {training.python} "$@"\n')
    (directory / "python").chmod(0o755)


def test_modules_are_loaded_for_each_attempt_and_their_python_packages_are_not_for_the_supervisor(
    lab: Lab, reference: Training
) -> None:
    """Lmod or Environment Modules themselves, with a module that sets PATH, a variable, and PYTHONPATH."""
    found = [path for path in MODULES if path.exists()]
    if not found:
        pytest.skip("no environment modules here: apt-get install lmod")
    training = Training(lab, name="modules")
    place = training.work / "site"
    python_of(training, place / "bin")
    for name, text in (
        ("mine", "NAME = 'mine'"),
        ("structlog", "raise SystemExit('loaded from a module of the site')"),
    ):
        (place / "packages").mkdir(exist_ok=True)
        (place / "packages" / f"{name}.py").write_text(text + "\n")
    (place / "files" / "train").mkdir(parents=True)
    (place / "files" / "train" / "1.0").write_text(
        f"#%Module1.0\nprepend-path PATH {place}/bin\nprepend-path PYTHONPATH {place}/packages\n"
        "setenv TRAINING_DATA /scratch\n"
    )
    for path in place.rglob("*"):
        path.chmod(0o755)
    batch(
        training,
        f"source {found[0]}",
        f"module use {place}/files",
        "module load train/1.0 || exit 1",
        f"exec {supervisor_python().parent}/stepkeeper run -- bash -c '"
        'test "$TRAINING_DATA:$LOADEDMODULES" = /scratch:train/1.0 && python -c "import mine" && '
        f"exec python {' '.join(SCRIPT)} {{resume}}'",
    )
    preempted(training)

    assert_complete(training, reference)


@pytest.fixture(scope="module")
def uv(lab: Lab) -> Path:
    """The program `uv`, where an ordinary user can run it."""
    place = lab.workdir("games") / "uv"
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", place, "uv==0.13.9"],
        capture_output=True, text=True, timeout=INSTALL_S, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"uv cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    return place / "bin" / "uv"


@pytest.mark.parametrize("line", ["{project}/.venv/bin/python", "{uv} run --no-sync --project {project} python"])
def test_an_environment_of_uv(lab: Lab, reference: Training, uv: Path, line: str) -> None:
    """The project's environment is made by uv; torch and the library are seen in it by a .pth file."""
    training = Training(lab, name=f"uv-{line.count(' ')}")
    project = training.work / f"{training.name}-project"
    asked = [training.python, "-c", "import sys; print([each for each in sys.path if 'site-packages' in each])"]
    packages = ast.literal_eval(lab.run(*asked, user=training.user).stdout)
    lab.run("mkdir", project, user=training.user)
    env = {"UV_OFFLINE": "1", "UV_CACHE_DIR": str(project / "cache"), "PATH": "/usr/bin:/bin"}
    base = Path(os.path.realpath(training.python))
    lab.run(uv, "venv", "--quiet", "--python", base, project / ".venv", user=training.user, env=env)
    (project / "pyproject.toml").write_text('[project]\nname = "mine"\nversion = "0"\n')
    (project / "pyproject.toml").chmod(0o644)
    [site] = (project / ".venv").glob("lib/python3*/site-packages")
    (site / "dependencies.pth").write_text("\n".join(packages) + "\n")
    (site / "dependencies.pth").chmod(0o644)
    words = [each.format(uv=uv, project=project) for each in line.split()]
    batch(
        training,
        *(f"export {name}={value}" for name, value in env.items()),
        shlex.join(["exec", f"{supervisor_python().parent}/stepkeeper", "run", "--", *words, *SCRIPT]),
    )
    training.wait_step(13)
    acts.kill_ranks(training)
    training.wait_end()

    assert len(training.launches()) == 2, training.story()
    assert_complete(training, reference)


def test_an_activated_environment_reaches_the_ranks(lab: Lab, reference: Training) -> None:
    """A batch script that activates an environment as `conda activate` does: a prefix, made by hand."""
    training = Training(lab, name="activated")
    prefix = training.work / "prefix"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "python").write_text(f'#!/bin/sh\nexec {training.python} "$@"\n')
    (prefix / "bin" / "python").chmod(0o755)
    script = "python -m stepkeeper_trainer.examples.train_lm --steps=40 --seed=7 --checkpoint-every-steps=10"
    line = " ".join([script, *SMALL])
    training.job_id = lab.submit(
        "#!/bin/bash\n"
        f'export CONDA_PREFIX="{prefix}" PATH="{prefix}/bin:$PATH"\n'
        f"exec {supervisor_python().parent}/stepkeeper run -- "
        f"""bash -c 'test "$(command -v python)" = "$CONDA_PREFIX/bin/python" """
        f"""&& exec {line} {{resume}}'\n""",
        sbatch_args=["-N2", "--ntasks-per-node=1", "--gres=gpu:1", "--mem=2000", f"--output={training.log}"],
        user=training.user,
        env={"STEPKEEPER_RUN_DIR": str(training.run_dir)},
    )
    training.wait_end()

    assert_complete(training, reference)

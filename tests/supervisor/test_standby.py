"""A warm standby becomes the rank, and is in nothing told from it; where it cannot, a rank is started as ever."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from stepkeeper import standby, wrapper
from stepkeeper.watcher import stop_signal
from stepkeeper.watcher.processes import kill_ranks
from stepkeeper_trainer.integrations import hook
from tests.supervisor.keepers import NODE, TORCH, WITHIN_S, Site, children_of, heard, say, until


@pytest.fixture
def site(tmp_path):
    made = Site(tmp_path)
    yield made
    for process in made.processes:
        process.kill()
    until(lambda: not kill_ranks(made.run_id, NODE, attempt_max=9), "the ranks' end")
    for process in made.processes:
        process.communicate(timeout=WITHIN_S)


TELL = """
import json, os, signal, sys
import beside, torch
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "cwd": os.getcwd(), "environment": dict(os.environ), "name": __name__,
    "file": __file__, "orig": sys.orig_argv, "stdin": sys.stdin.read(), "main": sys.modules["__main__"].TOLD,
    "signals": [str(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD)],
    "umask": os.umask(0), "descriptors": sorted(os.listdir("/proc/self/fd")), "beside": beside.__file__,
    "parents": os.getppid(), "cpus": sorted(os.sched_getaffinity(0)),
})) if (TOLD := 1) else None
print("said", file=sys.stderr)
"""


def told_by(process) -> dict:
    """Return what the script has told of itself, at the end of its rank."""
    out, err = process.communicate("given", timeout=WITHIN_S)
    assert (process.returncode, err) == (0, "said\n")
    return json.loads(out)


def seen_alike(told: list[dict], keeper) -> dict:
    """Return what a rank saw that was a standby, once it is what the other one saw that was started as usual."""
    warm, cold = told
    assert warm.pop("parents") == keeper.pid
    assert cold.pop("parents") != keeper.pid
    assert warm == cold
    return warm


@pytest.mark.parametrize("module", [False, True], ids=["script", "module"])
def test_a_standby_becomes_what_python_would_have_been(site, module):
    """The same script, once by a standby and once without: all that it can see of itself is the same."""
    words = [site.script(TELL), "--steps", "3"]
    (site.place / "elsewhere" / "beside.py").touch()
    if module:
        site.script(TELL)
        package = site.place / "package"
        (site.place / "elsewhere").rename(package)
        (site.place / "beside.py").touch()
        words = ["-m", "package.script", "--steps", "3"]
    site.torch(more="import os\nos.environ['SET_BY_TORCH'] = '1'")
    keeper = site.keeper()
    told = []
    for address in (site.address, ""):
        process = site.wrapper(*words, STEPKEEPER_STANDBY=address, GREETING="grüß\udcff")
        told.append(told_by(process))

    warm = seen_alike(told, keeper)
    assert warm["environment"]["RANK"] == "3"
    assert warm["environment"]["SET_BY_TORCH"] == "1"
    assert "STEPKEEPER_STANDBY" not in warm["environment"]


def test_a_program_of_python_is_one_too(site):
    """torchrun is a script with a shebang; the wrapper is told by which Python it runs."""
    program = Path(site.script(f"#!{sys.executable}\n{TELL}")).rename(site.place / "elsewhere" / "torchrun")
    program.chmod(0o755)
    (program.parent / "beside.py").touch()
    keeper = site.keeper()
    told = []
    for address in (site.address, ""):
        process = site.start(
            [sys.executable, "-I", "-S", site.program(wrapper), "--agent", "--", program.name, "--nnodes=1", "t.py"],
            site.environment(
                PATH=f"/nowhere:{program.parent}:{os.environ['PATH']}",
                STEPKEEPER_STANDBY=address,
                STEPKEEPER_STANDBY_PYTHON=sys.executable,
            ),
        )
        told.append(told_by(process))

    warm = seen_alike(told, keeper)
    assert warm["argv"] == [str(program), "--nnodes=1", "t.py"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("raise SystemExit(7)", 7),
        ("import os; os._exit(75)", 75),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import sys; sys.exit('words')", 1),
    ],
)
def test_the_wrapper_ends_as_the_standby_did(site, text, code):
    """srun must see the same end."""
    site.keeper()
    process = site.wrapper(site.script(text))

    _, err = process.communicate(timeout=WITHIN_S)

    assert process.returncode == code
    assert "no warm standby" not in err


def test_an_error_looks_as_ever(site):
    """What a log's rules read must not depend on who ran the script."""
    site.keeper()
    script = site.script("def load():\n    raise ValueError('of data')\n\nload()\n")
    warm, cold = (
        site.wrapper(script, STEPKEEPER_STANDBY=address).communicate(timeout=WITHIN_S)[1]
        for address in (site.address, "")
    )

    assert warm == cold
    assert warm.endswith("ValueError: of data\n")


def test_a_wrapper_that_is_killed_takes_its_rank_and_what_that_started_along(site):
    """Slurm and the watchers kill wrappers; the rank is in another Slurm step."""
    site.keeper()
    process = site.wrapper(
        site.script("import subprocess, time\nsubprocess.Popen(['sleep', '600'])\nprint('up')\ntime.sleep(600)\n")
    )
    assert process.stdout.readline() == "up\n"
    until(lambda: len(site.ranks()) == 3, "the wrapper, the rank and its child")

    process.kill()

    until(lambda: not site.ranks(), "the end of all three")


def test_watchers_end_ranks_and_leave_those_alone_that_wait(site):
    """A node is clear although a standby waits there; one that became a rank is ended like any."""
    keeper = site.keeper()
    assert kill_ranks(site.run_id, NODE, attempt_max=9) == 0
    assert not site.ranks()
    process = site.wrapper(site.script("import time\nprint('up')\ntime.sleep(600)\n"))
    assert process.stdout.readline() == "up\n"

    assert kill_ranks(site.run_id, NODE, attempt_max=9) >= 1  # the end of the wrapper is that of the rank as well

    assert process.wait(WITHIN_S) == -signal.SIGKILL
    until(lambda: not site.ranks(), "the end of the rank")
    say(keeper, "prepare")
    assert heard(keeper)["standby"] == "ready"
    script = site.script("print('the next one')")
    assert site.wrapper(script).communicate(timeout=WITHIN_S)[0] == "the next one\n"


def test_a_keeper_that_is_killed_takes_its_rank_along(site):
    """The end of the standby's Slurm step: the rank fails, and is told as failed."""
    keeper = site.keeper()
    process = site.wrapper(site.script("import time\nprint('up')\ntime.sleep(600)\n"))
    assert process.stdout.readline() == "up\n"

    keeper.kill()

    assert process.wait(WITHIN_S) == -signal.SIGKILL
    until(lambda: not site.ranks(), "the end of the rank")


def falls_back(site, why, *words, **more):
    script = site.script("import os\nprint('ran', os.getppid())")
    process = site.wrapper(*words, script, **more)
    out, err = process.communicate(timeout=WITHIN_S)
    assert (process.returncode, out) == (0, f"ran {process.pid}\n")
    assert f"no warm standby for this rank: {why}" in err


def test_without_a_keeper_a_rank_is_started_as_ever(site):
    falls_back(site, "[Errno 111] Connection refused")


def test_a_standby_that_died_before_is_none(site):
    keeper = site.keeper()
    (spare,) = children_of(keeper.pid)
    os.kill(spare, signal.SIGKILL)
    assert heard(keeper)["standby"] == "gone"

    falls_back(site, "none waits")


@pytest.mark.parametrize("who", ["keeper", pytest.param("spare", marks=pytest.mark.campaign)])
def test_one_that_was_stopped_is_not_waited_for_and_never_runs_it_too(site, who):
    """The limit is short; and once it goes on, it must not become a second rank."""
    site.patient = False
    keeper = site.keeper()
    (spare,) = children_of(keeper.pid)
    stopped = keeper.pid if who == "keeper" else spare
    os.kill(stopped, signal.SIGSTOP)
    mark = site.place / "runs"
    script = site.script(f"open({str(mark)!r}, 'a').write('x')")
    process = site.wrapper(script)

    _, err = process.communicate(timeout=WITHIN_S)

    assert process.returncode == 0
    assert "no warm standby for this rank: " in err
    assert mark.read_text() == "x"
    with contextlib.suppress(ProcessLookupError):  # the keeper has ended its spare
        os.kill(stopped, signal.SIGCONT)
    until(lambda: not Path(f"/proc/{spare}/stat").exists(), "the end of the spare")
    assert mark.read_text() == "x"


def test_what_a_program_reads_when_it_starts_must_be_the_same(site):
    """OpenMP counts its threads when it is loaded: a spare cannot follow."""
    site.keeper(OMP_NUM_THREADS="1")

    falls_back(site, "OMP_NUM_THREADS has changed, and is read when a program starts", OMP_NUM_THREADS="2")


def test_other_words_before_the_script_are_another_program(site):
    site.keeper()

    falls_back(site, "it runs", "-B", STEPKEEPER_STANDBY_WORDS="2")


def test_another_user_is_refused(site):
    """The address is hard to guess, and guessing it is not enough."""
    if os.getuid() != 0:
        pytest.skip("needs root to be another user")
    site.keeper()
    name = site.address[1:].replace("%N", NODE) + "/1"
    ask = f"import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('\\0{name}')\nprint(s.recv(1000))"
    done = subprocess.run(
        ["/usr/bin/env", "python3", "-c", ask],
        user=65534,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    if done.returncode in (126, 127):
        pytest.skip("no Python here that every user can run")
    assert "you are another user" in done.stdout, done.stderr


def test_a_spare_that_would_see_the_wrong_gpus_is_none(site):
    """CUDA reads which GPUs there are when it starts: that must happen in the launch."""
    site.torch(cuda=True)
    keeper = site.keeper("json", ready=False)

    said = heard(keeper)

    assert (said["standby"], said["why"]) == ("gone", "RefusedError: one of json starts CUDA when it is imported")


@pytest.mark.parametrize("looked", [False, True])
def test_the_gpus_of_the_launch_count(site, looked):
    """A module that asks how many GPUs there are settles it; one that does not leaves it to the launch."""
    file = site.place / "nvidia0"
    file.touch()
    more = f"import sys\nsys.modules['__main__'].GPU_FILES = ({str(file)!r},)\n"
    site.torch(more=more + (f"opened = open({str(file)!r})\n" if looked else ""))
    site.keeper(CUDA_VISIBLE_DEVICES="0")

    if looked:
        falls_back(site, "CUDA_VISIBLE_DEVICES has changed, and a module has looked", CUDA_VISIBLE_DEVICES="1")
    else:
        script = site.script("import os\nprint(os.environ['CUDA_VISIBLE_DEVICES'], os.getppid())")
        process = site.wrapper(script, CUDA_VISIBLE_DEVICES="1")
        out, err = process.communicate(timeout=WITHIN_S)
        assert (out.split()[0], err) == ("1", "")
        assert out.split()[1] != str(process.pid)


IMPORTS_UNTIL = "import os, time\nwhile not os.path.exists({!r}): time.sleep(0.01)"
HAS_DYNAMO = "import os, sys\nprint(os.getppid(), 'torch._dynamo' in sys.modules)\n"


def importing(site):
    """Return a keeper whose spare imports until a file is there, and the file."""
    done = site.place / "imported"
    (site.place / "torch.py").unlink()
    package = site.place / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(f"{TORCH.format(cuda=False, more='')}{IMPORTS_UNTIL.format(str(done))}\n")
    (package / "_dynamo.py").touch()
    keeper = site.keeper(ready=False)
    until(lambda: children_of(keeper.pid) and waits(keeper, 0), "the spare, whose end of the channel is its own")
    return keeper, done


def test_a_wrapper_waits_for_a_spare_that_imports_and_that_leaves_out_what_is_for_later(site):
    """It has begun before: a rank that starts anew would not be quicker."""
    keeper, done = importing(site)
    first = waiting(site, keeper)

    done.touch()

    assert first.communicate(timeout=WITHIN_S) == (f"{keeper.pid} False\n", "")
    until(lambda: not site.ranks(), "the end of the rank")
    say(keeper, "prepare")
    assert heard(keeper)["standby"] == "ready"  # of the first
    assert heard(keeper)["standby"] == "ready"
    again = site.wrapper(site.script(HAS_DYNAMO))
    assert again.communicate(timeout=WITHIN_S) == (f"{keeper.pid} True\n", "")


def test_a_wrapper_that_is_killed_while_it_waits_leaves_the_spare_to_the_next(site):
    keeper, done = importing(site)
    waiting(site, keeper).kill()
    until(lambda: waits(keeper, 0), "its end")
    second = waiting(site, keeper)

    done.touch()

    assert second.communicate(timeout=WITHIN_S) == (f"{keeper.pid} False\n", "")


def test_a_signal_for_the_rank_ends_the_wait_of_its_own_python(site):
    """Signals are held back meanwhile; torchrun ends its workers by one, and waits."""
    keeper, _ = importing(site)
    process = site.rank(site.script("print('ran')"))
    until(lambda: waits(keeper, 1), "a rank that waits")

    process.send_signal(signal.SIGTERM)

    assert process.wait(WITHIN_S) == -signal.SIGTERM
    assert "a signal came while it imported" in process.stderr.read()


def test_a_wrapper_and_the_import_may_end_in_the_same_moment(site):
    """A keeper that was held up finds both at once; the spare is for the next wrapper."""
    keeper, done = importing(site)
    gone = waiting(site, keeper)
    os.kill(keeper.pid, signal.SIGSTOP)
    gone.kill()
    gone.wait(WITHIN_S)
    done.touch()
    (spare,) = children_of(keeper.pid)
    until(lambda: says_ready(spare), "the spare")

    os.kill(keeper.pid, signal.SIGCONT)

    assert heard(keeper)["standby"] == "ready"
    assert site.wrapper(site.script(HAS_DYNAMO)).communicate(timeout=WITHIN_S) == (f"{keeper.pid} False\n", "")


def says_ready(spare):
    """Tell whether a spare has said all, and reads."""
    return Path(f"/proc/{spare}/wchan").read_text().startswith(("unix_stream", "sk_wait", "wait_woken", "do_wait")) or (
        Path(f"/proc/{spare}/syscall").read_text().split()[0] in ("45", "47")
    )


@pytest.mark.parametrize("how", ["time is up", "the supervisor ends it", "the spare dies"])
def test_a_wrapper_that_waits_in_vain_starts_its_rank(site, how):
    site.limits["IMPORTED_WITHIN_S"] = 1.0 if how == "time is up" else WITHIN_S
    keeper, _ = importing(site)
    process = site.wrapper(site.script("print('ran')"))
    if how == "time is up":
        why = "it still imports after 1 s"
    else:
        until(lambda: waits(keeper, 1), "a wrapper that waits")
        why = "the standby is about to leave" if "supervisor" in how else "it ended"
        say(keeper, "quit") if "supervisor" in how else os.kill(children_of(keeper.pid)[0], signal.SIGKILL)

    out, err = process.communicate(timeout=WITHIN_S)

    assert (process.returncode, out) == (0, "ran\n")
    assert err == f"stepkeeper: no warm standby for this rank: {why}; it starts without one\n"
    until(lambda: keeper.poll() is not None or not children_of(keeper.pid), "the end of the spare")


def waiting(site, keeper):
    """Return a wrapper that waits for a spare."""
    process = site.wrapper(site.script(HAS_DYNAMO))
    until(lambda: looks_at(keeper) == 5, "a wrapper that waits, and a spare that hurries")
    return process


def looks_at(keeper):
    """Return how many descriptors a keeper waits at: stdin, signals, listener, spare, and the wrapper that waits."""
    place = Path(f"/proc/{keeper.pid}")
    files = [each for each in (place / "fd").iterdir() if os.path.lexists(each)]
    (selector,) = [each.name for each in files if "eventpoll" in os.readlink(each)]
    return (place / "fdinfo" / selector).read_text().count("tfd:")


def waits(keeper, wrappers):
    """Tell whether so many wrappers are connected to a keeper whose spare imports: it has listener and channel."""
    sockets = [os.readlink(each) for each in Path(f"/proc/{keeper.pid}/fd").iterdir() if os.path.lexists(each)]
    return sum(each.startswith("socket:") for each in sockets) == 2 + wrappers


@pytest.mark.parametrize("how", ["quit", "SIGTERM"])
def test_a_keeper_leaves_nothing_behind_for_which_slurm_would_wait(site, how):
    """slurmstepd looks once a second whether what a task has left is gone; its job, and the next attempt, wait."""
    site.torch(more="kept = b'1' * 400_000_000")  # which takes the kernel some time to take back
    keeper = site.keeper()
    (spare,) = children_of(keeper.pid)

    say(keeper, "quit") if how == "quit" else keeper.send_signal(signal.SIGTERM)

    assert keeper.wait(WITHIN_S) == 0
    assert not Path(f"/proc/{spare}").exists()


@pytest.mark.parametrize("how", ["quit", "end of input", "SIGTERM"])
def test_a_keeper_leaves_at_once_but_not_from_under_its_rank(site, how):
    """Neither a requeue nor a cancellation waits for those that wait; a rank comes to its own end."""
    keeper = site.keeper()
    process = site.wrapper(site.script("print('up')\ninput()\nraise SystemExit(3)\n"))
    assert process.stdout.readline() == "up\n"
    say(keeper, "prepare")
    assert heard(keeper)["standby"] == "ready"
    (spare,) = set(children_of(keeper.pid)) - site.ranks()

    if how == "SIGTERM":
        keeper.send_signal(signal.SIGTERM)
    elif how == "quit":
        say(keeper, "quit")
    else:
        keeper.stdin.close()

    until(lambda: not Path(f"/proc/{spare}").exists(), "the end of the one that waits")
    assert process.poll() is None
    assert keeper.poll() is None
    process.communicate("go\n", timeout=WITHIN_S)
    assert process.returncode == 3
    assert keeper.wait(WITHIN_S) == 0
    keeper.stdin = None  # closed above, in one of the cases


def test_an_environment_that_comes_in_pieces_is_read_whole():
    ours, theirs = socket.socketpair()
    text = standby.line({"x": "y" * 300_000})
    thread = threading.Thread(target=ours.sendall, args=(text,))
    thread.start()

    assert standby.read_line(theirs) == text

    thread.join(WITHIN_S)
    ours.close()
    theirs.close()


# --- a rank that its own Python hands over ----------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("-u", "script"), ("-u", "-m"), ("script",)], ids=["script", "module", "buffered"])
def test_a_rank_that_others_have_started_becomes_a_standby_and_sees_what_it_would_have_seen(site, words):
    """As torchrun starts its ranks, and srun those of a user's own line: once with the hook, and once as they are."""
    script = site.script(TELL)
    (site.place / "elsewhere" / "beside.py").touch()
    options = tuple(word for word in words if word == "-u")
    rest = [script, "--steps", "3"]
    if words[-1] == "-m":
        (site.place / "elsewhere").rename(site.place / "package")
        (site.place / "beside.py").touch()
        rest = ["-m", "package.script", "--steps", "3"]
    keeper = site.keeper(options=options)
    told = []
    for more in ({}, {wrapper.HOOK: "", wrapper.SLOT: "", "PYTHONPATH": str(site.place)}):
        before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as behind `nohup`: what is ignored is inherited
        process = site.rank(*options, *rest, GREETING="grüß\udcff", LOCAL_RANK="0", TORCHELASTIC_RUN_ID="r", **more)
        signal.signal(signal.SIGUSR1, before)
        out, err = process.communicate("given", timeout=WITHIN_S)
        assert (process.returncode, err) == (0, "said\n")
        told.append(json.loads(out))

    warm, cold = told
    assert warm.pop("parents") == keeper.pid
    assert cold.pop("parents") == os.getpid()
    for name in (wrapper.HOOK, wrapper.SLOT):
        assert cold["environment"].pop(name) == ""
    assert warm["signals"][2] == str(int(signal.SIG_IGN))
    assert warm == cold


@pytest.mark.parametrize("end", [7, 75, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGABRT])
def test_the_process_that_was_started_ends_as_the_rank(site, end):
    """torchrun and srun look at it, and at nothing else."""
    site.keeper()
    what = f"os.kill(os.getpid(), {-end})" if end < 0 else f"os._exit({end})"
    process = site.rank(site.script(f"import os\nprint(os.getppid())\n{what}\n"), PYTHONUNBUFFERED="1")

    out, err = process.communicate(timeout=WITHIN_S)

    assert (process.returncode, err) == (end, "")
    assert int(out) != os.getpid(), "a standby has run it"


CATCH = """
import signal, sys, time
def told(number, _):
    print(signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(5)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, told)
print("up", flush=True)
while True:
    time.sleep(0.01)
"""


def test_signals_reach_the_rank(site):
    """torchrun ends its ranks by SIGTERM, and Slurm signals what it has started."""
    site.keeper()
    process = site.rank(site.script(CATCH))
    assert process.stdout.readline() == "up\n"

    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "SIGUSR1\n"
    process.send_signal(signal.SIGTERM)

    assert process.stdout.readline() == "SIGTERM\n"
    assert process.wait(WITHIN_S) == 5


def test_watchers_send_the_stop_signal_to_the_rank_alone(site):
    """A handler must not run twice; and what the rank has started is no rank, although it has a rank's environment."""
    site.keeper()
    process = site.rank(site.script(f"import subprocess\nsubprocess.Popen(['sleep', '600'])\n{CATCH}"), RANK="1")
    assert process.stdout.readline() == "up\n"

    processes = stop_signal.look(site.run_id, NODE, attempt_max=9, number=signal.SIGTERM)

    assert process.pid in processes
    (chosen,) = stop_signal.choose(processes, ())
    assert chosen != process.pid
    assert processes[chosen].caught


def test_watchers_send_the_stop_signal_to_torchruns_ranks_and_not_to_torchrun(site):
    """Both are standbys: torchrun catches SIGTERM too, and would end its ranks."""
    hooked = {wrapper.HOOK: f"{site.address}-of-ranks", wrapper.SLOT: "LOCAL_RANK"}
    hooked["PYTHONPATH"] = f"{site.site()}:{site.place}"
    agents = site.keeper(**hooked)
    ranks = site.keeper(STEPKEEPER_STANDBY=hooked[wrapper.HOOK])
    rank = site.script(CATCH)
    agent = site.place / "torchrun.py"
    agent.write_text(
        "import os, signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, print)\n"
        "variables = {**os.environ, 'RANK': '3', 'TORCHELASTIC_RUN_ID': 'r', 'LOCAL_RANK': '1'}\n"
        f"subprocess.run([sys.executable, {rank!r}], env=variables, check=True)\n"
    )
    process = site.start(
        [sys.executable, "-I", "-S", site.program(wrapper), "--agent", "--", sys.executable, str(agent)],
        site.environment(STEPKEEPER_STANDBY_WORDS="1", **hooked),
    )
    assert process.stdout.readline() == "up\n"

    processes = stop_signal.look(site.run_id, NODE, attempt_max=9, number=signal.SIGTERM)

    (chosen,) = stop_signal.choose(processes, ())
    assert processes[chosen].caught
    assert chosen in children_of(ranks.pid)
    assert len(children_of(agents.pid)) == 1, "torchrun is a standby as well"


@pytest.mark.parametrize(("ignored", "code"), [([], -signal.SIGTERM), ([signal.SIGTERM], 0)])
def test_a_signal_that_comes_while_a_standby_becomes_a_rank_is_the_ranks(tmp_path, ignored, code):
    """Until its script begins the process has no handler, and it must not ignore the signal."""
    (tmp_path / "rank.py").write_text("print('up')")
    words = [
        "import os, signal",
        "from stepkeeper import standby",
        f"task = {{'held': standby.hold_signals(), 'ignored': {[int(each) for each in ignored]}}}",
        "os.kill(os.getpid(), signal.SIGTERM)",
        f"standby.become(task | {{'prefix': ['python'], 'words': [{str(tmp_path / 'rank.py')!r}]}})",
    ]

    ended = subprocess.run([sys.executable, "-c", "\n".join(words)], capture_output=True, timeout=WITHIN_S, check=False)

    assert ended.returncode == code
    assert ended.stdout == (b"" if code else b"up\n")


@pytest.mark.parametrize("killed", ["the process that was started", "the keeper"])
def test_when_one_of_both_is_killed_the_rank_ends(site, killed):
    keeper = site.keeper()
    process = site.rank(
        site.script(
            "import subprocess, time\nsubprocess.Popen(['sleep', '600'])\nprint('up', flush=True)\ntime.sleep(600)\n"
        )
    )
    assert process.stdout.readline() == "up\n"

    (keeper if killed == "the keeper" else process).kill()

    assert process.wait(WITHIN_S) == -signal.SIGKILL
    if killed != "the keeper":  # else watchers end what the rank has left behind, and Slurm does
        until(lambda: not site.ranks(), "the end of the rank and of its child")


@pytest.mark.parametrize(
    ("options", "more", "why"),
    [
        (("-B",), {}, "it runs"),
        ((), {"OMP_NUM_THREADS": "2"}, "OMP_NUM_THREADS has changed"),
        ((), {"SLURM_LOCALID": "7"}, "[Errno 111] Connection refused"),
    ],
)
def test_where_no_standby_fits_it_is_the_rank_itself(site, options, more, why):
    """In the same process, which has changed nothing of itself."""
    site.keeper()
    script = site.script(
        "import os, signal, sys\n"
        "print('ran', os.getpid(), signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, signal.pthread_sigmask(0, ()),\n"
        "    [name for name in os.environ if 'STANDBY' in name], [each for each in sys.path if 'standby_site' in each])"
    )
    process = site.rank(*options, script, **more)

    out, err = process.communicate(timeout=WITHIN_S)

    assert (process.returncode, out) == (0, f"ran {process.pid} True set() [] []\n")
    assert f"no warm standby for this rank: {why}" in err


def test_a_python_that_is_no_rank_goes_on(site):
    """torchrun itself has no LOCAL_RANK; its ranks find what it has inherited."""
    site.keeper()
    told = f"import os; print(os.environ['{wrapper.HOOK}'], 'standby_site' in os.environ['PYTHONPATH'])"
    process = site.rank(site.script(told), **{wrapper.SLOT: "LOCAL_RANK"})

    assert process.communicate(timeout=WITHIN_S) == (f"{site.address} True\n", "")


def test_what_a_rank_starts_is_none(site):
    site.keeper()
    child = site.place / "child.py"
    child.write_text("import os\nprint(os.getppid())")
    started = (
        "import os, subprocess, sys\nprint(os.getpid(), flush=True)\nsubprocess.run([sys.executable, {!r}], check=True)"
    )
    for options in ((), ("-B",)):  # by a standby, and as it is
        out, _ = site.rank(*options, site.script(started.format(str(child)))).communicate(timeout=WITHIN_S)
        assert len(set(out.split())) == 1


def test_a_sitecustomize_of_the_user_is_loaded_as_ever(site):
    (site.place / "sitecustomize.py").write_text("import os\nos.environ['THEIRS'] = '1'")
    keeper = site.keeper()

    process = site.rank(site.script("import os\nprint(os.environ['THEIRS'], os.getppid())"))

    assert process.communicate(timeout=WITHIN_S) == (f"1 {keeper.pid}\n", "")


def test_with_the_hook_of_frameworks_before_it_both_do_their_work(site):
    """`--attach` puts its own directory first."""
    attach = str(Path(hook.__file__).parent / "site")
    keeper = site.keeper(PYTHONPATH=f"{attach}:{site.place}", **{hook.VARIABLE: "auto"})
    script = site.script(
        "import os, sys\nprint(os.getppid(), os.environ['PYTHONPATH'], any(type(each).__name__ == '_Waiting' "
        "for each in sys.meta_path), 'sitecustomize' in sys.modules)"
    )
    warm = {"PYTHONPATH": f"{attach}:{site.site()}:{site.place}", hook.VARIABLE: "auto"}
    cold = warm | {"PYTHONPATH": f"{attach}:{site.place}", wrapper.HOOK: "", wrapper.SLOT: ""}
    told = [site.rank(script, **more).communicate(timeout=WITHIN_S) for more in (warm, cold)]

    expected = f"{attach}:{site.place} True False\n"
    assert told == [(f"{keeper.pid} {expected}", ""), (f"{os.getpid()} {expected}", "")]

"""The log is the supervisor's own voice: losing it must not cost the training."""

import io
import subprocess
import sys
import time

import pytest

from stepkeeper.log import LINES_WAITING_MAX, PatientStream
from stepkeeper.store import logs

CHATTER = (
    "import sys\n"
    "from stepkeeper.log import PatientStream, configure\n"
    "out = PatientStream(lambda: sys.stdout)\n"
    "log = configure(out, job=7)\n"
    "for number in range(1000):\n"
    "    log.info('decision', why='x' * 100, number=number)\n"
    "out.drain(5)\n"
    "sys.stderr.write('alive')\n"
    "sys.stderr.flush()\n"
    "import os; os._exit(0)\n"
)


def test_a_full_disk_below_stdout_ends_nothing():
    """The batch job's output is a file on the very storage that fills up."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", CHATTER], stdout=full, stderr=subprocess.PIPE, timeout=90, check=False
        )

    assert (done.returncode, done.stderr) == (0, b"alive")


def test_a_stdout_that_was_closed_before_we_started_ends_nothing():
    """Python then has none at all: the last words of a thread would be a traceback."""
    closed = ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, CHATTER]
    done = subprocess.run(closed, stderr=subprocess.PIPE, timeout=90, check=False)

    assert (done.returncode, done.stderr) == (0, b"alive")


def test_a_stdout_that_is_gone_and_comes_back_is_written_to():
    """Gone as the interpreter ends; what was said meanwhile is counted, and the thread goes on."""
    kept = io.StringIO()
    streams = iter((None, None, kept))
    stream = PatientStream(lambda: next(streams))

    for word in ("lost ", "lost too ", "kept"):
        stream.write(word)
    stream.drain(90)

    assert (stream.dropped, kept.getvalue()) == (2, "kept")


def test_a_copy_is_whole_where_the_log_itself_is_lost(tmp_path):
    """Slurm may empty a job's log at each attempt, and several attempts add to one copy."""
    logs.open_supervisors(tmp_path / "attempt-000").write("before\n")
    stream = PatientStream(lambda: None)
    stream.copy_to(PatientStream(lambda: logs.open_supervisors(tmp_path / "attempt-000")))

    stream.write("after\n")
    stream.drain(90)

    kept = tmp_path / "attempt-000" / "supervisor.log"
    assert (stream.dropped, kept.read_text()) == (1, "before\nafter\n")
    kept.unlink()
    kept.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        logs.open_supervisors(tmp_path / "attempt-000")


def test_a_stdout_that_hangs_holds_nobody_up():
    """A pipe that nobody reads stands for a file system that does not answer."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHATTER.replace("drain(5)", "drain(0.2)")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stderr is not None

        assert process.stderr.read(5) == b"alive"
    finally:
        process.kill()
        process.communicate(timeout=90)


def test_what_cannot_be_kept_is_dropped_and_counted():
    """Memory is bounded, too."""
    blocked = PatientStream(lambda: time.sleep(60))  # type: ignore[arg-type, return-value]

    for _ in range(LINES_WAITING_MAX + 50):
        blocked.write("x")

    assert blocked.dropped >= 49


@pytest.mark.parametrize(
    "line", ["TOKEN=abcdef123456", "password: hunter22", "https://u:secretpw@host", "hf_abcdefgh12345678"]
)
def test_secrets_do_not_reach_a_line(line):
    """srun's last words, and so ranks' output, stand in `why`."""
    code = CHATTER.replace("'x' * 100", repr(line))

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=90, check=False)

    for secret in (b"abcdef123456", b"hunter22", b"secretpw", b"hf_abcdefgh12345678"):
        assert secret not in done.stdout
    assert b"***" in done.stdout

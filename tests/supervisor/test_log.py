"""The log is the supervisor's own voice: losing it must not cost the training."""

import io
import json
import os
import pty
import subprocess
import sys
import time

import pytest

from stepkeeper.log import LINES_WAITING_MAX, PatientStream
from stepkeeper.logtext import is_own
from stepkeeper.run_store import paths

CHATTER = (
    "import sys\n"
    "from stepkeeper.log import Form, PatientStream, configure\n"
    "out = PatientStream(lambda: sys.stdout)\n"
    "log = configure(out, PatientStream(lambda: None), job=7)\n"
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


BOTH = (
    "import sys\n"
    "from pathlib import Path\n"
    "from stepkeeper.log import Form, PatientStream, configure\n"
    "from stepkeeper.run_store import paths\n"
    "out = PatientStream(lambda: sys.stdout)\n"
    "kept = PatientStream(lambda: paths.open_supervisors(Path(sys.argv[1])))\n"
    "log = configure(out, kept, form=Form(sys.argv[2]), job=7)\n"
    "log.warning('code_changed', differences=['commit a', 'TOKEN=abcdef123456'], why='other code\\nruns \\x1b[31m')\n"
    "log.info('progress', step=3, loss=2.125, tokens=None)\n"
    "for stream in (out, kept):\n"
    "    stream.drain(60)\n"
    "sys.stdout.flush()\n"
    "import os; os._exit(0)\n"
)


@pytest.mark.parametrize("form", ["text", "json"])
def test_people_read_text_and_programs_find_json_in_a_file_of_their_own(tmp_path, form):
    """A person opens the job's log; JSON there is for those who ask for it."""
    words = [sys.executable, "-c", BOTH, str(tmp_path / "attempt-000"), form]
    said = subprocess.run(words, capture_output=True, text=True, timeout=90, check=True).stdout.splitlines()

    kept = [json.loads(line) for line in (tmp_path / "attempt-000" / "supervisor.jsonl").read_text().splitlines()]
    assert [(line["event"], line["level"], line["job"]) for line in kept] == [
        ("code_changed", "warning", 7),
        ("progress", "info", 7),
    ]
    assert kept[0]["differences"] == ["commit a", "TOKEN=***"]
    assert all(is_own(line) for line in said), said
    if form == "json":
        assert [json.loads(line) for line in said] == kept
        return
    changed, progress = (line.partition("] ")[2] for line in said)
    assert changed == 'WARNING code_changed: other code runs [31m (differences="commit a,TOKEN=***")'
    assert progress == "progress: step=3 loss=2.125"


def test_a_terminal_gets_the_same_text_in_colour(tmp_path):
    leader, follower = pty.openpty()
    try:
        words = [sys.executable, "-c", BOTH, str(tmp_path / "attempt-000"), "text"]
        subprocess.run(words, stdout=follower, stderr=subprocess.DEVNULL, timeout=90, check=True)
        said = os.read(leader, 65536).decode()
    finally:
        os.close(leader)
        os.close(follower)

    assert "\x1b[33mWARNING \x1b[0m\x1b[1mcode_changed\x1b[0m: other code" in said


def test_what_the_log_has_lost_is_in_the_file_of_the_run_directory(tmp_path):
    """Slurm may empty a job's log at each attempt; a link in the file's place is not followed."""
    words = [sys.executable, "-c", BOTH, str(tmp_path / "attempt-000"), "text"]
    with open("/dev/full", "w") as full:
        for _ in range(2):
            subprocess.run(words, stdout=full, stderr=subprocess.DEVNULL, timeout=90, check=True)

    kept = tmp_path / "attempt-000" / "supervisor.jsonl"
    assert len(kept.read_text().splitlines()) == 4
    kept.unlink()
    kept.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        paths.open_supervisors(tmp_path / "attempt-000")


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

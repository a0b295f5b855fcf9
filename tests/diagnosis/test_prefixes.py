"""What collectors, launchers and loggers put before a line, and Stepkeeper's own lines."""

from __future__ import annotations

import logging
from io import StringIO

import pytest
import structlog

from stepkeeper.core.causes import Cause
from stepkeeper.diagnosis import log_lines
from stepkeeper_trainer import log as library
from tests.diagnosis.corpus import verdict

ERROR = "ValueError: bad batch"
PREFIXES = [
    "2026-01-02T03:04:05.678Z stderr F ",
    "2026-01-02T03:04:05.678+01:00 | ",
    "2026-01-02T03:04:05.678-07:00",
    "2026-01-02 03:04:05,678 - root - ERROR - ",
    "2026-01-02 03:04:05.678 | ERROR    | __main__:main:45 - ",
    "[2026-01-02 03:04:05,678] [ERROR] [engine.py:41:step] ",
    "26/01/02 03:04:05 ERROR Executor: ",
    "2026-01-02 03:04:05,678 ERROR [stdout-3] o.a.h.Task: ",
    "Jan  2 03:04:05 gpu-3 train[4711]: ",
    "03:04:05 worker: ",
    "ERROR:root:",
    "[pod/train-worker-1/pytorch] ",
    "train-worker-1  | ",
    "[1,31]<stderr>:",
    "[1,mpirank:31,algo-1]<stderr>:",
    "10.0.0.7: ",
    "gpu-07.cluster: ",
    "(RayTrainWorker pid=41, ip=10.0.0.1) ",
    "(TrainWorker(rank=3) pid=41) 2026-01-02 03:04:05,678 ERROR train.py:41 -- ",
    "12: [rank12]: ",
    "2026-01-02T03:04:05Z 12: [default12]:",
]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_an_exception_is_found_behind_any_prefix(prefix: str) -> None:
    lines = ["Traceback (most recent call last):", '  File "/w/train.py", line 7, in main', "    step()", ERROR]

    alone = verdict(f"{prefix}{ERROR}\n")
    whole = verdict("".join(f"{prefix}{line}\n" for line in lines))

    assert log_lines.parse_line(prefix + ERROR).text == ERROR
    assert alone.cause is Cause.EXCEPTION
    assert whole.location == "ValueError at /w/train.py:7 in main"


@pytest.mark.parametrize("prefix", ["", "[2026-01-02 03:04:05] ", "2026-01-02 03:04:05 ", "3: [2026-01-02 03:04:05] "])
def test_behind_an_instant_nccl_still_names_its_node(prefix: str) -> None:
    said = "gpu-07:4711:4790 [2] transport/nvls.cc:254 NCCL WARN Cuda failure 1 'invalid argument'"

    judged = verdict(prefix + said)

    assert (judged.cause, judged.node, judged.evidence[0].gpu) == (Cause.NODE_FAULT, "gpu-07", "2")


def test_a_prefix_of_unknown_form_is_taken_off_the_lines_of_a_traceback() -> None:
    log = "".join(
        f"<<job 7>> worker-{number} +{number}.5s "[:-1] + f" {line}\n"
        for number, line in enumerate(
            ["Traceback (most recent call last):", '  File "/w/train.py", line 7, in main', "    step()", ERROR]
        )
    )

    assert verdict(log).location == "ValueError at /w/train.py:7 in main"


def test_two_writers_tracebacks_are_kept_apart() -> None:
    log = (
        "(Worker pid=41, ip=10.0.0.1) Traceback (most recent call last):\n"
        "(Worker pid=42, ip=10.0.0.2) Traceback (most recent call last):\n"
        '(Worker pid=41, ip=10.0.0.1)   File "/w/a.py", line 1, in a\n'
        '(Worker pid=42, ip=10.0.0.2)   File "/w/b.py", line 2, in b\n'
        "(Worker pid=41, ip=10.0.0.1) ValueError: a\n"
        "(Worker pid=42, ip=10.0.0.2) KeyError: 'b'\n"
    )

    judged = verdict(log)

    assert judged.location == "ValueError at /w/a.py:1 in a"
    assert (judged.evidence[0].pid, judged.evidence[0].node) == (41, "10.0.0.1")


@pytest.mark.parametrize(
    "text",
    [
        "step 3 loss 2.5",
        "{'loss': 1.4, 'grad_norm': nan}",
        "train_step loss=nan lr=0.1",
        "[info     ] step_done                      loss=nan step=7",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0",
        "srun: error: n2: task 1: Killed",
        "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
        "train.py: error: unrecognized arguments: --x",
        "RuntimeError: CUDA error: out of memory",
        "safetensors_rust.SafetensorError: Error while serializing: No space left on device",
    ],
)
def test_words_of_programs_are_no_prefix(text: str) -> None:
    assert log_lines.parse_line(text).text == text


def test_lines_of_the_library_are_no_word_of_the_training(caplog: pytest.LogCaptureFixture) -> None:
    for form in ("%(message)s", "%(levelname)s:%(name)s:%(message)s", "%(asctime)s %(name)s %(levelname)s %(message)s"):
        stream = StringIO()
        handler = logging.StreamHandler(stream)
        handler.setFormatter(logging.Formatter(form))
        logger = logging.getLogger("stepkeeper_trainer")
        logger.addHandler(handler)
        try:
            library.warn("watcher_lost", why="Connection refused")
            library.warn("rank_lost", rank=1, why="[pair.cc:534] Connection closed by peer [10.0.0.1]:2")
            library.warn("save_failed", step=7, error="OSError: [Errno 28]\nNo space left on device")
        finally:
            logger.removeHandler(handler)

        assert stream.getvalue().count("\n") == 3, "one line each"
        assert verdict(stream.getvalue()).cause is Cause.UNKNOWN, stream.getvalue()
        assert verdict("1: [rank1]: " + stream.getvalue()).cause is Cause.UNKNOWN
    assert caplog.records


@pytest.mark.parametrize(
    "own",
    [
        "[stepkeeper 2026-09-21 10:00:00] decision: rank 1 on n2 ended: CUDA out of memory (effects=relaunch)",
        '[stepkeeper 2026-09-21 10:00:00] WARNING lease_unreadable: error="[Errno 5] Input/output error"',
        '{"timestamp": "2026-01-02T03:04:05.678901Z", "level": "info", "event": "exit", "reason": "out of memory"}',
    ],
)
def test_lines_of_a_jobs_log_that_the_supervisor_wrote_are_no_evidence(own: str) -> None:
    assert log_lines.is_own(own)
    assert verdict(own).cause is Cause.UNKNOWN


@pytest.mark.parametrize("pretty", [True, False])
def test_lines_of_the_supervisor_are_no_word_of_the_training(*, pretty: bool) -> None:
    stream = StringIO()
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=True) if pretty else structlog.processors.JSONRenderer(sort_keys=False)
    )
    event = {"timestamp": "2026-01-02T03:04:05.678901Z", "level": "info", "event": "decision", "job": 7, "attempt": 0}
    said = renderer(None, "info", {**event, "why": "rank 1 on n2 ended with signal 9: Connection reset by peer"})
    stream.write(f"{said!s}\n")

    assert verdict(stream.getvalue()).cause is Cause.UNKNOWN, stream.getvalue()

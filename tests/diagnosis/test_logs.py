from __future__ import annotations

import io
import json
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from stepkeeper.core.causes import Cause
from stepkeeper.diagnosis import log_lines, logs, rules
from stepkeeper.diagnosis.classify import LIKELY, Role
from tests.diagnosis.corpus import verdict

ROOT = Path(__file__).parents[2]
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
STACK = f'Traceback (most recent call last):\n  File "/w/train.py", line 61, in main\n    step()\n{OOM}'


@pytest.mark.campaign
def test_the_end_of_a_huge_log_is_found_with_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "n1.log"
    with path.open("wb") as file:
        for step in range(12):
            file.write(b"".join(b"0: step %d loss 2.5\n" % (step * 60_000 + i) for i in range(60_000)))
        file.write(STACK.replace("\n", "\n1: ").encode())
    assert path.stat().st_size > 2 * log_lines.TAIL_BYTES_MAX

    with path.open("rb") as file:
        log = log_lines.read_log(file)

    assert log.skipped_bytes > 0
    assert sum(len(line.text) for line in log.lines) < log_lines.HEAD_BYTES_MAX + log_lines.TAIL_BYTES_MAX
    assert [each.cause for each in logs.log_evidence(log)] == [Cause.GPU_MEMORY]


def test_numbers_that_tell_are_read_in_every_line_of_progress() -> None:
    healthy = "".join(f"step {step} loss 2.{step} loss scale: 1.0e-0\n" for step in range(30))

    assert verdict(healthy).cause is Cause.UNKNOWN
    assert verdict(healthy + "step 31 loss 2.5 loss scale: 1.0e-30\n" + healthy).cause is Cause.NUMERICAL
    assert verdict(healthy + "step 31 loss nan\n" + healthy).cause is Cause.NUMERICAL


def test_a_torch_that_finds_no_numpy_is_no_error_of_the_program() -> None:
    log = """/env/torch/nn/functional.py:1: UserWarning: Failed to initialize NumPy: No module named 'numpy'
Traceback (most recent call last):
  File "/w/train.py", line 3, in <module>
    table = losses.numpy()
RuntimeError: Numpy is not available
"""
    assert verdict(log).cause is Cause.CONFIGURATION


@pytest.mark.parametrize(
    "refused",
    [
        "srun: fatal: --mem, --mem-per-cpu, and --mem-per-gpu are mutually exclusive.",
        "srun: fatal: cpus-per-task set by two different environment variables SLURM_CPUS_PER_TASK=2 != 3",
        "srun: fatal: No command given to execute.",
    ],
)
def test_a_launch_line_that_srun_refuses_is_no_failure_to_repeat(refused: str) -> None:
    assert verdict(f"{refused}\n").cause is Cause.CONFIGURATION


@pytest.mark.parametrize(
    ("why", "cause"),
    [
        ("Job/step already completing or completed", Cause.CANCELLED),
        ("Invalid job id specified", Cause.CANCELLED),
        ("Required node not available (down, drained or reserved)", Cause.NODE_LOST),
        ("Requested node configuration is not available", Cause.CONFIGURATION),
        ("Memory required by task is not available", Cause.UNKNOWN),
        ("Requested nodes are busy", Cause.UNKNOWN),
    ],
)
def test_a_step_that_slurm_does_not_create_is_the_launch_lines_fault_only_where_it_says_so(
    why: str, cause: Cause
) -> None:
    assert verdict(f"srun: error: Unable to create step for job 7: {why}\n").cause is cause


@pytest.mark.campaign
def test_the_end_of_a_pipe_is_found_too() -> None:
    readable, writable = os.pipe()

    def write() -> None:
        with open(writable, "wb") as file:
            file.writelines(b"0: step 1 loss 2.5\n" * 250_000 for _ in range(3))
            file.write(STACK.encode())

    writer = threading.Thread(target=write)
    writer.start()
    with open(readable, "rb") as file:
        log = log_lines.read_log(file)
    writer.join(30.0)

    assert log.skipped_bytes > 0
    assert [each.location for each in logs.log_evidence(log)] == ["OutOfMemoryError at /w/train.py:61 in main"]


@pytest.mark.parametrize(
    "log",
    [
        b"",
        b"\n\n\r\r\n",
        b"\x00\xff\xfe" * 1000,
        random.Random(7).randbytes(50_000),  # noqa: S311 - noise, no secret
        b"x" * 3_000_000,
        b"Traceback (most recent call last):\n" * 2000,
        b'  File "' + b"a" * 10_000 + b'", line 1\n',
        ("\x1b[31m\u202etrain\x1b]0;title\x07\n").encode(),
    ],
)
def test_any_bytes_are_read_and_none_of_them_is_a_failure(log: bytes) -> None:
    assert verdict(log).cause is Cause.UNKNOWN


def test_a_failure_is_found_behind_colours_bars_and_prefixes() -> None:
    for log in (
        "\x1b[1;31m" + OOM + "\x1b[0m",
        " 10%|#   | 1/9 [00:01<00:08]\r 20%|##  | 2/9 [00:02<00:07]" + OOM,
        "3: [rank3]: " + OOM,
        "[default3]:" + OOM,
        "2026-01-02T03:04:05.678Z stderr F " + OOM,
        "(Worker pid=41, ip=10.0.0.1) " + OOM,
        "x" * 10_000 + " " + OOM,
    ):
        assert verdict(log).cause is Cause.GPU_MEMORY, log


def test_ranks_are_taken_from_labels_and_from_torchs_own_words() -> None:
    assert log_lines.parse_lines(b" 12: [rank3]: x")[:2] == (3, "x")
    assert log_lines.parse_lines(b"7: hello")[:2] == (7, "hello")
    assert log_lines.parse_lines(b"[Rank 5] Watchdog caught collective operation timeout")[0] == 5
    assert log_lines.parse_lines(b"no rank here")[:2] == (None, "no rank here")


def test_of_chained_exceptions_the_one_that_nobody_handled_counts() -> None:
    chained = (
        'Traceback (most recent call last):\n  File "/w/a.py", line 1, in a\nKeyError: 1\n\n'
        "During handling of the above exception, another exception occurred:\n\n"
        'Traceback (most recent call last):\n  File "/w/b.py", line 2, in b\nValueError: 2\n'
    )
    direct = chained.replace(
        "During handling of the above exception, another exception occurred:",
        "The above exception was the direct cause of the following exception:",
    )

    assert verdict(chained).location == "ValueError at /w/b.py:2 in b"
    assert verdict(direct).location == "KeyError at /w/a.py:1 in a"


def test_the_location_is_in_the_users_own_code() -> None:
    log = (
        "Traceback (most recent call last):\n"
        '  File "/w/train.py", line 9, in <module>\n    main()\n'
        '  File "/env/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1, in _call_impl\n'
        "ValueError: bad\n"
    )

    assert verdict(log).location == "ValueError at /w/train.py:9"


def test_an_error_that_training_went_on_after_did_not_end_it() -> None:
    survived = STACK + "".join(f"\nstep {step} loss 2.{step}" for step in range(6))

    assert verdict(survived).cause is not Cause.GPU_MEMORY or verdict(survived).role is Role.CONFIRMATION
    assert verdict(survived + "\n" + STACK).cause is Cause.GPU_MEMORY


@pytest.mark.parametrize("times", [1, 2, 7])
@pytest.mark.parametrize(
    "said",
    [
        OOM,
        STACK,
        "mlflow: HTTPConnectionPool(host='tracker', port=80): Max retries exceeded with url: /api",
        "could not read /data/7.tar: [Errno 5] Input/output error; next shard",
        "Found nan in gradients of this batch",
    ],
)
def test_errors_that_training_went_on_after_each_time_did_not_end_it(said: str, times: int) -> None:
    steps = "".join(f"step {step} loss 2.{step}\n" for step in range(6))
    survived = f"{said}\n{steps}" * times
    error = 'Traceback (most recent call last):\n  File "/w/train.py", line 9, in <module>\nIndexError: list index'

    assert verdict(survived + "bye").confidence < LIKELY
    assert verdict(survived + error).location == "IndexError at /w/train.py:9"
    assert verdict(survived + said).cause is verdict(said).cause
    assert verdict(survived + said).confidence == verdict(said).confidence


@pytest.mark.parametrize("label", ["", "{rank}: ", "[rank{rank}]: "])
@pytest.mark.parametrize(
    "step",
    [
        "rank {rank} step 10 loss 2.{rank}",
        " 10%|#  | 10/100 [00:10<01:30, 1.{rank}it/s]",
        "Epoch: [3][ 10/5005] Loss {rank}.1",
    ],
)
def test_one_step_that_all_other_ranks_tell_of_is_none_that_training_went_on_with(label: str, step: str) -> None:
    def of(rank: int, text: str) -> str:
        return "".join(f"{label.format(rank=rank)}{line}\n" for line in text.split("\n"))

    told = "".join(of(rank, step.format(rank=rank)) for rank in range(64) if rank != 3)
    timeout = of(0, "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE)")
    mine = step.format(rank=0)
    went_on = "".join(of(0, mine.replace("10/", f"1{at}/").replace("step 10", f"step 1{at}")) for at in range(6))

    assert verdict(of(3, STACK) + told + timeout).cause is Cause.GPU_MEMORY
    assert verdict(of(3, STACK) + told + went_on + timeout).cause is Cause.COLLECTIVE_TIMEOUT


@pytest.mark.parametrize("surrounded", [False, True])
@pytest.mark.parametrize(
    "record",
    [
        lambda text: json.dumps({"time": "2026-01-10T15:27:25Z", "level": "ERROR", "exc_info": text, "host": "n1"}),
        lambda text: f"level=error err=failed stack={json.dumps(text)} host=n1",
        lambda text: f"{{'level': 'error', 'stack': {text!r}, 'host': 'n1'}}",
        lambda text: json.dumps({"message": "x" * 5000, "exc_info": text, "thread": "y" * 5000}),
    ],
)
def test_a_traceback_in_one_record_of_a_logger_is_read(record: Callable[[str], str], surrounded: bool) -> None:  # noqa: FBT001
    around = '{"level": "INFO", "message": "start"}\n' if surrounded else ""
    error = "KeyError: 'a \"b\" \\\\ c'"
    stack = f'Traceback (most recent call last):\n  File "/w/train.py", line 61, in main\n    step()\n{error}'

    assert verdict(around + record(stack) + "\n" + around).location == "KeyError at /w/train.py:61 in main"
    assert verdict(around + record(STACK) + "\n" + around).cause is Cause.GPU_MEMORY


def test_of_chained_exceptions_in_one_record_one_that_a_rule_knows_counts() -> None:
    chained = f"{STACK}\n\nDuring handling of the above exception, another exception occurred:\n\n"
    chained += 'Traceback (most recent call last):\n  File "/w/train.py", line 70, in main\nRuntimeError: step failed'

    assert verdict(json.dumps({"level": "error", "exc_info": chained})).cause is Cause.GPU_MEMORY


def test_a_pool_whose_process_is_gone_was_killed_as_far_as_anybody_knows() -> None:
    said = "concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated abruptly"

    assert verdict(f"{said} while the future was running or pending.").rule == "killed"


def test_ranks_that_slurm_ends_write_on_for_a_while() -> None:
    """As many lines as fit into KillWait say nothing against Slurm's word; more of them are another attempt's."""
    ended = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-10T15:27:25 DUE TO TIME LIMIT ***"
    went_on = [f"\nstep {step} loss 2.{step}" for step in range(60)]

    assert verdict(ended + "".join(went_on[:12])).cause is Cause.TIME_LIMIT
    assert verdict(ended + "".join(went_on)).cause is not Cause.TIME_LIMIT
    assert verdict(ended + "".join(went_on) + "\n" + STACK).cause is Cause.GPU_MEMORY


def test_a_service_that_is_asked_again_has_not_refused() -> None:
    refused = "request failed with status code 503"

    assert verdict(refused).cause is Cause.NETWORK
    assert verdict(f"{refused}, retrying in 5 seconds").cause is Cause.UNKNOWN


def test_what_ray_tells_of_another_node_does_not_blame_the_one_that_it_tells_it_on() -> None:
    lost = (
        b"Owner Ip address: 10.0.0.7 Owner worker exit type: SYSTEM_ERROR Worker exit detail: Owner's node has crashed."
    )
    log = log_lines.read_log(io.BytesIO(b"The actor is dead because its owner has died. " + lost))

    assert [(each.cause, each.node) for each in logs.log_evidence(log, node="n1")] == [(Cause.NODE_LOST, "10.0.0.7")]


def test_torchs_error_files_are_read_and_torn_ones_passed_over() -> None:
    message = {"message": OOM, "extraInfo": {"py_callstack": STACK, "timestamp": "1790000000"}}
    whole = logs.error_file_evidence(json.dumps({"message": message}).encode(), rank=3)
    plain = logs.error_file_evidence(b'{"message": "SIGSEGV received"}')

    assert whole is not None
    assert (whole.cause, whole.rank, whole.at) == (Cause.GPU_MEMORY, 3, 1_790_000_000.0)
    assert whole.location == "OutOfMemoryError at /w/train.py:61 in main"
    assert plain is not None
    assert plain.cause is Cause.SEGFAULT
    for torn in (b"", b"{", b"[1]", b"null", b'{"message": 7}', b'{"message": {"message": null}}', b"\xff"):
        assert logs.error_file_evidence(torn) is None


def test_a_wrong_rule_is_refused_with_its_name() -> None:
    whole = (ROOT / "supervisor/stepkeeper/diagnosis/rules.toml").read_text()
    good = '[[rule]]\nid = "a"\ncause = "hang"\nrole = "root"\nconfidence = 0.5\nmatch = ["x"]\nsays = "y"\n'
    assert rules.parse(whole + good).says("a") == "y"
    for change, words in (
        (("0.5", "1.5"), "rule a: confidence"),
        (('["x"]', "[]"), "rule a matches nothing"),
        (('["x"]', '["("]'), "rule a: "),
        (('"hang"', '"bad luck"'), "bad luck"),
        (('says = "y"', 'says = "y"\nweight = 3'), "weight"),
        (('says = "y"', 'says = "y"\nframes = ["z"]'), "exceptions only"),
    ):
        with pytest.raises(rules.RulesError, match=words):
            rules.parse(whole + good.replace(*change))
    with pytest.raises(rules.RulesError, match="a stands there twice"):
        rules.parse(whole + good + good)
    with pytest.raises(rules.RulesError, match="no meaning for"):
        rules.parse(good + "[causes]\n")


def test_the_same_rule_for_the_same_rank_is_told_once_with_a_count() -> None:
    log = log_lines.read_log(io.BytesIO(b"3: CUDA out of memory\n" * 40 + b"4: CUDA out of memory\n"))

    assert [(each.rank, each.count, each.line) for each in logs.log_evidence(log)] == [(3, 40, 1), (4, 1, 41)]

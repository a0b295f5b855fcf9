from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from stepkeeper.config.settings import RunSettings
from stepkeeper.core import events as on
from stepkeeper.core.policy import Policy
from stepkeeper.run_analytics import metrics, serving
from stepkeeper.run_analytics.metrics import METRICS, TalliedJournal, Tally, TextFile, exported, text
from stepkeeper.run_analytics.serving import Port
from stepkeeper.run_store import journal
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper.run_store.status import Status
from tests.run_analytics.build import START, Journal, wrong_loss

DOCS = Path(__file__).parents[2] / "docs"
WITHIN_S = 90.0
EVIL = 'a"b\\c\nd\udcffé'


def status(**changes: object) -> Status:
    fields: dict[str, object] = {
        "run_id": "r", "job_id": 7, "restart_count": 0, "attempt": 2, "launch": 1, "phase": "training",
        "nodes": ("n1", "n2"), "step": 25, "tokens": 2500, "loss": 1 / 3, "step_seconds": 0.5, "checkpoint_step": 20,
        "started_at": START, "updated_at": START + 65,
    }  # fmt: skip
    return Status(**{**fields, **changes})  # type: ignore[arg-type]


def failing() -> Journal:
    """A rank fails, a save fails, a node is left, Slurm preempts."""
    told = Journal(nodes=("n1", "n2", "n3"), policy=Policy(hang_watch=False))
    told.begin(0, nodes_wanted=2)
    told.launch(10)
    told.steps(1, 20, at=20)
    told.commit(10, at=31, seconds=2.5)
    told.tell(on.SaveFailed(at=START + 35, launch=0, step=15, save_id="x", error="disk full"))
    told.rank_dies(40)
    told.launch(45, resume=10)
    told.steps(11, 5, at=50)
    fault = {"incident": "i", "name": "XID 79", "action": "drain", "leave": True, "why": "it left the bus"}
    told.tell(on.NodeFaulted(at=START + 56, node="n2", **fault))
    told.tell(on.LaunchEnded(at=START + 57, launch=1, code=137))
    told.tell(on.SignalReceived(at=START + 58, signal="TERM"))
    job = on.JobFacts(
        state=on.JobState.RUNNING, slurm_state="RUNNING", restarts=0, preempt_at=START + 58, end_at=START + 90
    )
    told.tell(on.SlurmAnswered(at=START + 58, job=job))
    return told


def tallied() -> Tally:
    tally = Tally()
    for record in failing().records:
        tally.take(record)
    return tally


def exposed() -> str:
    return text(tallied().values(status(), "0.1", START + 70), {"run": EVIL, "job": "7"})


def values(exposition: str) -> dict[str, float]:
    """`name{other labels}` -> value, by a parser that is not ours."""
    found = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            rest = ",".join(f"{k}={v}" for k, v in sample.labels.items() if k not in ("run", "job"))
            found[f"{sample.name}{{{rest}}}" if rest else sample.name] = sample.value
    return found


def test_a_real_parser_reads_what_was_counted() -> None:
    found = values(exposed())

    assert found["stepkeeper_launches_total"] == 2
    assert found["stepkeeper_checkpoints_total{outcome=committed}"] == 1
    assert found["stepkeeper_checkpoints_total{outcome=failed}"] == 1
    assert found["stepkeeper_checkpoint_save_seconds_total"] == 2.5
    assert found["stepkeeper_launch_failures_total{cause=exception}"] == 1
    assert found["stepkeeper_node_faults_total{leave=yes}"] == 1
    assert found["stepkeeper_nodes_left_total"] == 1
    assert found["stepkeeper_notices_total{notice=preempted}"] == 1
    assert found["stepkeeper_loss"] == 1 / 3
    assert found["stepkeeper_phase{phase=training}"] == 1
    assert sum(value for name, value in found.items() if name.startswith("stepkeeper_phase{")) == 1
    assert sum(value for name, value in found.items() if "phase_seconds" in name) == pytest.approx(70)
    assert "stepkeeper_exit_code" not in found


def test_what_never_happened_is_counted_as_0_so_that_its_first_time_is_an_increase() -> None:
    found = values(text(Tally().values(status(), "0.1", START), {}))

    for name in (
        "stepkeeper_launches_total",
        "stepkeeper_launch_failures_total{cause=gpu_memory}",
        "stepkeeper_loss_anomalies_total{rule=loss-spike}",
        "stepkeeper_notices_total{notice=time_limit}",
        "stepkeeper_phase_seconds_total{phase=saving}",
        "stepkeeper_suspended_seconds_total",
    ):
        assert found[name] == 0, name
    assert {each.name for each in METRICS if each.is_counter} <= {name.partition("{")[0] for name in found}
    assert len(found) < 120, "few series, whatever happens"


def test_a_loss_that_goes_wrong_is_counted_once() -> None:
    told, tally = wrong_loss(), Tally()
    for record in told.records:
        tally.take(record)

    found = values(text(tally.values(status(), "0.1", START + 120), {}))

    assert found["stepkeeper_loss_anomalies_total{rule=loss-not-finite}"] == 1
    assert found["stepkeeper_loss_anomalies_total{rule=loss-spike}"] == 0


def test_suspended_time_is_counted() -> None:
    tally = Tally()
    told = failing()
    told.tell(on.Suspended(at=START + 70, seconds=9), on.Suspended(at=START + 95, seconds=21))
    for record in told.records:
        tally.take(record)

    assert values(text(tally.values(status(), "0.1", START + 96), {}))["stepkeeper_suspended_seconds_total"] == 30


def test_hostile_labels_survive_the_way() -> None:
    (family,) = text_string_to_metric_families(text({(metrics.STEP, ()): 3.0}, {"run": EVIL, "job": "7"}))

    assert family.samples[0].labels["run"] == 'a"b\\c\nd?é'


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.1, 1e300, 2**60, -3])
def test_every_number_reads_back(value: float) -> None:
    (family,) = text_string_to_metric_families(text({(metrics.LOSS, ()): value}, {}))

    assert family.samples[0].value == value or value != value  # noqa: PLR0124 - NaN is no equal of itself


def test_a_supervisor_without_metrics_does_not_import_the_library() -> None:
    """It would be 2.5 MB of each supervisor."""
    code = "import sys, stepkeeper.cli.run; assert 'prometheus_client' not in sys.modules"

    subprocess.run([sys.executable, "-c", code], check=True, timeout=WITHIN_S)


def test_names_follow_the_conventions() -> None:
    assert len({each.name for each in METRICS}) == len(METRICS) > 20
    for each in METRICS:
        assert re.fullmatch(r"stepkeeper_[a-z_]+", each.name)
        assert each.help.endswith(".")
        assert not re.search(r"_(ms|minutes|hours|kib|mb)(_|$)", each.name)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on this machine")
def test_promtool_has_no_complaint() -> None:
    for argv, given in (
        (["check", "metrics"], exposed()),
        (["check", "rules", str(DOCS / "prometheus-alerts.yml")], ""),
    ):
        done = subprocess.run(["promtool", *argv], input=given, capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


# --- dashboard and alerts -------------------------------------------------------------------------

CONDITION = re.compile(r"(stepkeeper_\w+)(?:\{([^}]*)\})?")


def used() -> Iterator[tuple[str, str]]:
    """Yield (metric, labels) of the dashboard and the alerts."""
    board = json.loads((DOCS / "grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    expressions += [each["expr"] for each in board["annotations"]["list"]]
    expressions += re.findall(r"expr: (.*)", (DOCS / "prometheus-alerts.yml").read_text())
    expressions += [each["query"] for each in board["templating"]["list"]]
    assert len(expressions) > 15
    for expression in expressions:
        yield from CONDITION.findall(expression)


def test_dashboard_and_alerts_use_metrics_that_there_are() -> None:
    declared = {each.name: each for each in METRICS}
    for name, condition in used():
        assert name in declared, name
        for label in re.findall(r"(\w+)\s*(?:=~|!=|=)", condition):
            assert label in ("run", "job", *declared[name].labels), (name, label)


def test_legends_name_labels_that_there_are() -> None:
    board = json.loads((DOCS / "grafana-dashboard.json").read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            names = {name for name, _ in CONDITION.findall(target["expr"])}
            labels = {label for each in METRICS if each.name in names for label in each.labels}
            for word in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert word in ("run", *labels), (panel["title"], word)


# --- giving them out ------------------------------------------------------------------------------


def until(condition: object) -> None:
    limit = time.monotonic() + WITHIN_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_the_file_is_whole_and_goes_with_the_supervisor(tmp_path: Path) -> None:
    trouble: list[OSError] = []
    file = TextFile(tmp_path, "stepkeeper-x", exposed, on_error=trouble.append)
    until((tmp_path / "stepkeeper-x.prom").exists)

    assert values((tmp_path / "stepkeeper-x.prom").read_text())["stepkeeper_step"] == 25
    assert (tmp_path / "stepkeeper-x.prom").stat().st_mode & 0o777 == 0o644
    assert [path.suffix for path in tmp_path.iterdir()] == [".prom"]  # node_exporter reads *.prom

    file.close(WITHIN_S, keep=False)
    assert list(tmp_path.iterdir()) == []
    assert trouble == []


def test_a_directory_that_is_not_there_is_said_once(tmp_path: Path) -> None:
    trouble: list[OSError] = []
    file = TextFile(tmp_path / "nowhere", "x", exposed, on_error=trouble.append)
    until(lambda: trouble)
    file.close(WITHIN_S, keep=True)

    assert len(trouble) == 1


@pytest.fixture
def served() -> Iterator[Port]:
    server = Port("127.0.0.1", 0, exposed)
    yield server
    server.close()


DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever proxy the machine has


def get(number: int, path: str) -> tuple[int, str, str]:
    try:
        with DIRECTLY.open(f"http://127.0.0.1:{number}{path}", timeout=90) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, "", error.read().decode()


def test_the_port_answers_only_what_it_is_for(served: Port) -> None:
    code, kind, body = get(served.number, "/metrics")

    assert (code, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert values(body)["stepkeeper_step"] == 25
    assert get(served.number, "/")[0] == 404
    assert get(served.number, "/../../etc/passwd")[0] == 404
    with socket.create_connection(("127.0.0.1", served.number), timeout=90) as client:
        client.sendall(b"DELETE /metrics HTTP/1.0\r\n\r\n")
        assert b"501" in client.recv(100)


def test_callers_that_hold_the_line_do_not_shut_others_out_for_long(
    served: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving.Handler, "timeout", 0.5)
    others = set(threading.enumerate())
    holding = [
        socket.create_connection(("127.0.0.1", served.number), timeout=90) for _ in range(2 * serving.CALLERS_MAX)
    ]

    def answers() -> bool:
        try:
            return get(served.number, "/metrics")[0] == 200
        except OSError:
            return False  # turned away

    until(answers)
    begun = set(threading.enumerate()) - others
    assert sum(thread.name.startswith("Thread-") for thread in begun) <= serving.CALLERS_MAX
    for each in holding:
        each.close()


class Log:
    def __init__(self) -> None:
        self.said: list[str] = []

    def info(self, event: str, **_: object) -> None:
        self.said.append(event)

    warning = info


def run_with(tmp_path: Path, log: Log, newest: Status, **settings: object) -> Iterator[None]:
    directory = RunDirectory(tmp_path)
    wanted = RunSettings(**settings)  # type: ignore[arg-type]
    logger: structlog.typing.FilteringBoundLogger = log  # type: ignore[assignment]
    with exported(wanted, directory, tallied(), lambda: newest, now=lambda: START + 70, log=logger):
        yield


def test_a_port_that_is_taken_costs_a_line_in_the_log(tmp_path: Path, served: Port) -> None:
    log = Log()
    for _ in run_with(tmp_path, log, status(), metrics_port=str(served.number)):
        assert log.said == ["metrics_not_served"]


@pytest.mark.parametrize(("code", "left"), [(10, 0), (0, 0), (20, 1)])
def test_the_figures_of_a_run_that_needs_a_person_stay(tmp_path: Path, code: int, left: int) -> None:
    log = Log()
    for _ in run_with(tmp_path, log, status(phase="done", exit_code=code), metrics_textfile=str(tmp_path)):
        until(lambda: list(tmp_path.glob("*.prom")))

    files = list(tmp_path.glob("stepkeeper-*.prom"))
    assert len(files) == left
    assert all(values(file.read_text())["stepkeeper_exit_code"] == code for file in files)


def test_the_journal_is_written_as_before(tmp_path: Path) -> None:
    plain = journal.JournalWriter(tmp_path / "plain.jsonl")
    writer = TalliedJournal(tmp_path / "journal.jsonl", tally := Tally())
    for record in failing().records:
        plain.append(record)
        writer.append(record)

    assert plain.flush(WITHIN_S)
    assert writer.flush(WITHIN_S)
    assert (tmp_path / "journal.jsonl").read_text() == (tmp_path / "plain.jsonl").read_text() != ""
    assert tally.values(status(), "1", START)[metrics.LAUNCHES, ()] == 2

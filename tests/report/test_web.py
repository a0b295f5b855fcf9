from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.state import Phase
from stepkeeper.errors import StepkeeperError
from stepkeeper.run_analytics import web
from stepkeeper.run_analytics.report import live
from stepkeeper.run_store.paths import RunDirectory
from tests.reading import build as runs
from tests.reading.conftest import Command, command, run
from tests.reasons import in_words
from tests.report.test_page import EVIL, Page
from tests.run_analytics.build import START, Journal

__all__ = ["command", "run"]  # fixtures of the reading commands

WITHIN_S = 90.0


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: str


class Viewer:
    """Somebody who asks a server."""

    def __init__(self, port: int, token: str) -> None:
        self.port = port
        self.token = token

    def ask(
        self, wanted: str = "", *, method: str = "GET", path: str | None = None, hosts: tuple[str, ...] = ("127.0.0.1",)
    ) -> Answer:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=WITHIN_S)) as connection:
            connection.putrequest(method, path if path is not None else f"/{self.token}/{wanted}", skip_host=True)
            for host in hosts:
                if host:
                    connection.putheader("Host", host)
            connection.endheaders()
            answer = connection.getresponse()
            return Answer(answer.status, dict(answer.getheaders()), answer.read().decode())

    def news(self, since: int = 0) -> dict[str, Any]:
        answer = self.ask(f"page.json?since={since}")
        assert answer.status == 200
        found: dict[str, Any] = json.loads(answer.body)
        return found


@contextmanager
def served(shown: RunDirectory) -> Iterator[Viewer]:
    server, token = web.listen(shown)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield Viewer(server.server_port, token)
    finally:
        server.shutdown()
        thread.join(WITHIN_S)
        server.server_close()


@pytest.fixture
def viewer(run: RunDirectory) -> Iterator[Viewer]:
    story = runs.story(run)
    began = {"job_id": 12, "restart_count": 1, "attempt": 1, "batch_node": "n1", "kill_wait_s": 30.0}
    started = on.AttemptStarted(at=START + 15, nodes=("n1", "n2"), **began)  # type: ignore[arg-type]
    runs.write_journal(run, [*story[:3], runs.record(started, phase=Phase.STARTING), *story[3:]])
    runs.write_status(run)
    with served(run) as found:
        yield found


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each question read anew: a test that waits for the next look is slow."""
    for name in ("QUICK_EVERY_S", "WHOLE_EVERY_S", "WHOLE_TIMES"):
        monkeypatch.setattr(web, name, 0.0)


def written(told: Journal, shown: RunDirectory, since: int = 0) -> int:
    """Append what is new to the journal, and write all rows."""
    runs.write_journal(shown, told.records[since:])
    rows = [
        f"{step},{loss!r},{step * 100},0.001,1.0,{at / 1e6!r},{attempt},{launch}\n"
        for (attempt, launch), found in told.rows.items()
        for step, loss, at in zip(found.step, found.loss, found.at, strict=True)
    ]
    (shown.path / "metrics.csv").write_text("step,loss,tokens,lr,grad_norm,time,attempt,launch\n" + "".join(rows))
    return len(told.records)


# --- who may ask what --------------------------------------------------------------------------------


def test_the_page_says_what_a_person_wants_to_know(viewer: Viewer) -> None:
    said = Page(viewer.ask().body).text

    for words in (
        "my-run",
        "job 12 (restart 1), attempt 1, launch 0",
        "Now",
        "250, loss 2.125, 250,000 tokens",
        "step 200 is committed",
        "Last decisions",
        "newest verified step directory",
        "Where the time went",
        "Nodes and ranks",
        "Checkpoints",
        "Timeline",
    ):
        assert words in said, words


def test_nobody_gets_in_without_the_token(viewer: Viewer) -> None:
    right = viewer.token
    wrong = ["/", "/page.json"]
    wrong += [f"/{right[:-1]}/", f"/{right}x/", f"/x/{right}/", "/%C3%A9/", "*", f"/?{right}"]
    for path in wrong:
        answer = viewer.ask(path=path)
        assert answer.status == 403, path
        assert "my-run" not in answer.body
        assert right not in answer.body
    assert len(right) >= 32
    assert viewer.ask().status == 200


@pytest.mark.parametrize(
    ("hosts", "status"),
    [
        (("127.0.0.1",), 200),
        (("localhost:8265",), 200),
        (("LOCALHOST",), 200),
        (("[::1]:8265",), 200),
        (("evil.example",), 421),
        (("evil.example:80",), 421),
        (("localhost.evil.example",), 421),
        (("127.0.0.1@evil.example",), 421),
        (("[::1",), 421),
        (("127.0.0.1", "evil.example"), 421),
        (("",), 421),
    ],
)
def test_a_page_of_another_site_cannot_reach_it_by_a_name_of_its_own(
    viewer: Viewer, hosts: tuple[str, ...], status: int
) -> None:
    answer = viewer.ask(hosts=hosts)

    assert answer.status == status
    assert ("my-run" in answer.body) == (status == 200)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "EVIL"])
def test_it_can_only_be_read(viewer: Viewer, method: str) -> None:
    answer = viewer.ask(method=method)

    assert (answer.status, answer.headers["Allow"]) == (405, "GET")
    assert "my-run" not in answer.body
    assert method not in answer.body


@pytest.mark.parametrize(
    "path",
    ["../status.json", "status.json", "%2e%2e/x", "..%2f..%2fetc/passwd", "/etc/passwd", "page.json/", "\\..\\x"],
)
def test_there_are_no_other_files(viewer: Viewer, path: str) -> None:
    answer = viewer.ask(path)

    assert answer.status == 404
    assert "phase" not in answer.body


@pytest.mark.parametrize("since", ["-1", "x", "", "9" * 5000, "1e3", "%D9%A3", "0&since=9", "999"])
def test_a_version_that_nobody_gave_out_gets_the_whole_page(viewer: Viewer, since: str) -> None:
    answer = viewer.ask(path=f"/{viewer.token}/page.json?since={since}")

    assert answer.status == 200
    assert set(json.loads(answer.body)["parts"]) == set(live.ORDER)


def test_what_is_no_request_gets_a_plain_answer(viewer: Viewer) -> None:
    for data in (b"<script>alert(1)</script> x HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\nA" + b"x" * 70_000, b"\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", viewer.port), timeout=WITHIN_S) as caller:
            caller.sendall(data)
            caller.shutdown(socket.SHUT_WR)
            said = b""
            try:
                while part := caller.recv(65536):
                    said += part
            except ConnectionResetError:
                pass  # it did not read all of this
        assert b"<script>" not in said
    assert viewer.ask().status == 200


def test_the_answers_forbid_what_a_page_of_ours_never_does(viewer: Viewer) -> None:
    for answer in (viewer.ask(), viewer.ask("page.json"), viewer.ask("nothing")):
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; ")
        assert not re.search(r"https?:|\*|unsafe-eval|script-src[^;]*unsafe", policy)
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert "Access-Control-Allow-Origin" not in answer.headers
    parsed = Page(viewer.ask().body)
    loads = [value for _, attributes in parsed.tags for name, value in attributes.items() if name in ("src", "href")]
    assert loads == ["data:,"]


# --- what a hostile run directory can do ----------------------------------------------------------


def test_hostile_names_stay_words(run: RunDirectory) -> None:
    told = Journal(nodes=("n1", EVIL))
    told.begin(0)
    told.launch(1)
    told.steps(1, 5, at=1)
    fault = {"incident": EVIL, "name": EVIL, "action": EVIL, "leave": True, "why": EVIL, "gpu": EVIL}
    told.tell(on.NodeFaulted(at=START + 6, node=EVIL, **fault))  # type: ignore[arg-type]
    told.tell(on.LaunchRefused(at=START + 7, launch=0, error=EVIL))
    written(told, run)
    fields = dict.fromkeys(("why", "phase", "resumed_from", "slurm_name", "reason", "run_id"), EVIL)
    runs.write_status(run, **fields, nodes=(EVIL,), waits_for=(EVIL,))
    (run.checkpoints / "step_00000005").mkdir()

    with served(run) as viewer:
        page = viewer.ask().body
        parts = viewer.news()["parts"]

    for html in (page, *parts.values()):
        parsed = Page(html)
        assert "img" not in [tag for tag, _ in parsed.tags]
        assert not any(name.startswith("on") for _, attributes in parsed.tags for name in attributes)
        assert "\x1b" not in html
        assert "\u202e" not in html
    assert [tag for tag, _ in Page(page).tags].count("script") == 2
    assert not any("script" in tag for html in parts.values() for tag, _ in Page(html).tags)
    assert "onerror=alert(2)" in Page(page).text


@pytest.mark.parametrize("name", ["status.json", "journal.jsonl", "metrics.csv"])
def test_a_link_out_of_the_run_directory_is_not_followed(run: RunDirectory, tmp_path: Path, name: str) -> None:
    runs.write_journal(run, runs.story(run))
    runs.write_status(run)
    secret = tmp_path / "secret"
    secret.write_text('{"why": "a secret"}\n')
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).symlink_to(secret)

    with served(run) as viewer:
        assert "a secret" not in viewer.ask().body
        assert name in viewer.news()["problem"], "it says which file cannot be read"


def test_torn_files_are_no_trouble(run: RunDirectory) -> None:
    run.status.write_bytes(b'{"run_id": ')
    run.journal.write_bytes(b"\xff\x00\n{}\n[[[[\n" + b"[" * 100_000)
    (run.path / "metrics.csv").write_bytes(b"1,nan,3\n,,,,,,,\n1e999,1,1,1,1,1e999,0,0\n")

    with served(run) as viewer:
        news = viewer.news()

    assert news["problem"] == ""
    assert "No supervisor has worked on this run yet, or its status cannot be read." in news["parts"]["said"]


def test_a_strangers_files_are_refused_as_status_does(run: RunDirectory, command: Command) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    runs.write_status(run)
    os.chown(run.checkpoints, 12345, 12345)

    assert command("status", run.path, "--web").code == ExitCode.RUN_DIRECTORY


# --- a run that goes on ---------------------------------------------------------------------------


def test_a_browser_gets_what_has_changed(run: RunDirectory) -> None:
    told = Journal()
    told.begin(0)
    told.launch(1)
    told.steps(1, 20, at=1)
    count = written(told, run)
    runs.write_status(run, step=20, attempt=0, total_steps=40, updated_at=START + 21)
    with served(run) as viewer:
        first = viewer.news()
        assert set(first["parts"]) == set(live.ORDER)
        assert "rank 1 on n2 ended" not in "".join(first["parts"].values())
        quiet = viewer.news(first["version"])
        assert set(quiet["parts"]) <= {"now"}, "ages go on; the rest is not sent again"

        told.rank_dies(22)
        written(told, run, count)
        news = viewer.news(first["version"])

        assert news["version"] > first["version"]
        assert "rank 1 on n2 ended with exit code 1" in news["parts"]["decisions"]
        assert "ranks ended" in news["parts"]["nodes"]
        assert {"failures", "timeline"} <= set(news["parts"])
        assert not {"started", "checkpoints", "incidents"} & set(news["parts"])
        again = viewer.news(first["version"])
        assert again["parts"]["decisions"] == news["parts"]["decisions"], "another viewer gets it too"


def test_progress_and_the_loss_follow_the_rows(run: RunDirectory) -> None:
    told = Journal()
    told.begin(0)
    told.launch(1)
    told.steps(1, 10, at=1)
    written(told, run)
    runs.write_status(run, step=10, attempt=0, total_steps=40, updated_at=START + 11)
    with served(run) as viewer:
        first = viewer.news()
        with (run.path / "metrics.csv").open("a") as file:
            file.write(f"11,NaN,1100,0.001,1.0,{START + 12},0,0\n12,3.0,1200,0.001,1.0,17900")  # torn
        runs.write_status(run, step=20, attempt=0, total_steps=40, loss=None, loss_not_finite=True)
        news = viewer.news(first["version"])

    assert 'value="0.5000"' in news["parts"]["now"]
    assert "NaN or infinite" in news["parts"]["now"]
    assert "step 11: the loss is not a finite number" in news["parts"]["loss"]


def test_the_newest_checkpoint_and_the_newest_verified_one(run: RunDirectory) -> None:
    runs.write_journal(run, runs.story(run))
    for directory in runs.make_steps(run, 2):
        for each in directory.iterdir():
            os.utime(each, (START, START))  # written before the journal says what was verified
    runs.write_status(run)
    with served(run) as viewer:
        now = Page(viewer.news()["parts"]["now"]).text
        assert re.search(r"checkpoint step 200 .*: committed, not yet verified verified step 100 resumed from", now)
        runs.write_status(run, checkpoint_step=250)
        later = Page(viewer.news()["parts"]["now"]).text

    assert re.search(r"checkpoint step 250.*: committed, not yet verified", later), "nobody has looked at it yet"


def test_a_finished_run_is_shown_as_it_ended(run: RunDirectory) -> None:
    runs.write_journal(run, runs.story(run))
    runs.write_status(run, phase="done", exit_code=0, total_steps=250)

    with served(run) as viewer:
        parts = viewer.news()["parts"]

    assert "finished" in parts["head"]
    assert "(exit code 0)" in parts["said"]
    assert "none in use" in parts["now"]
    assert "ETA" not in parts["now"]


def test_what_a_run_that_has_ended_has_not_verified_a_person_may_verify(run: RunDirectory) -> None:
    ended = do.Exit(code=0, reasons=in_words("the training is finished"))
    last = runs.record(on.Tick(at=START + 50), phase=Phase.DONE, why="the training is finished", effects=(ended,))
    runs.write_journal(run, [*runs.story(run), last])
    runs.make_steps(run, 2)
    runs.write_status(run, phase="done", exit_code=0, total_steps=250)

    with served(run) as viewer:
        parts = viewer.news()["parts"]

    shown = Page(parts["now"]).text
    assert f"(to verify it: stepkeeper checkpoints verify {run.checkpoints / 'step_00000200'})" in shown
    assert "2 committed, not verified, " in Page(parts["checkpoints"]).text
    assert "not yet verified" not in shown + Page(parts["checkpoints"]).text


def test_a_run_that_is_removed_and_comes_back_says_so(run: RunDirectory) -> None:
    runs.write_journal(run, runs.story(run))
    runs.write_status(run)
    with served(run) as viewer:
        version = viewer.news()["version"]
        away = run.path.with_name("away")
        run.path.rename(away)
        assert str(run.path) in viewer.news(version)["problem"]
        assert viewer.ask().status == 200
        away.rename(run.path)
        assert viewer.news(version)["problem"] == ""


def test_nothing_is_written_to_the_run_directory(run: RunDirectory) -> None:
    runs.write_journal(run, runs.story(run))
    runs.write_status(run)
    runs.make_steps(run)

    def contents() -> dict[str, tuple[int, int]]:
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in (run.path, *run.path.rglob("*"))}

    before = contents()
    with served(run) as viewer:
        for wanted in ("", "page.json"):
            assert viewer.ask(wanted).status == 200

    assert contents() == before


def test_many_viewers_share_one_look(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.write_journal(run, runs.story(run))
    runs.write_status(run)
    for name in ("QUICK_EVERY_S", "WHOLE_EVERY_S"):
        monkeypatch.setattr(web, name, 3600.0)
    looked: list[object] = []
    see = web.reading.Reader.see

    def counted(reader: web.reading.Reader, **more: Any) -> object:
        looked.append(reader)
        return see(reader, **more)

    monkeypatch.setattr(web.reading.Reader, "see", counted)
    with served(run) as viewer:
        answers: list[int] = []
        threads = [threading.Thread(target=lambda: answers.append(viewer.ask().status)) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WITHIN_S)

    assert answers == [200] * 12
    assert len(looked) == 1


def test_a_caller_that_has_the_whole_read_keeps_nobody_waiting(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.write_journal(run, runs.story(run))
    runs.write_status(run)
    watched = web.Watched(run)
    watched.html()
    monkeypatch.setattr(watched, "_whole_at", time.monotonic())
    begun, may_end = threading.Event(), threading.Event()
    see = web.reading.Reader.see

    def slowly(reader: web.reading.Reader, **more: Any) -> object:
        begun.set()
        may_end.wait(WITHIN_S)
        return see(reader, **more)

    monkeypatch.setattr(web.reading.Reader, "see", slowly)
    reader = threading.Thread(target=watched.html)
    reader.start()
    try:
        assert begun.wait(WITHIN_S)
        answered = threading.Thread(target=lambda: watched.news(0))
        answered.start()
        answered.join(WITHIN_S / 2)
        assert not answered.is_alive()
    finally:
        may_end.set()
        reader.join(WITHIN_S)


def long_run(run: RunDirectory, *, nodes: int = 64, steps: int = 100_000) -> Journal:
    """Write a run on nodes of 8 GPUs, with a checkpoint every 500 steps."""
    told = Journal(nodes=tuple(f"gpu{index:04d}" for index in range(nodes)))
    told.begin(0, gpus_per_node=8)
    told.launch(0)
    launch = told.state.launch.number
    with (run.path / "metrics.csv").open("w") as file:
        file.write("step,loss,tokens,lr,grad_norm,time,attempt,launch\n")
        losses = ((n, 4 - n * 1e-5 + n % 17 / 100) for n in range(1, steps + 1))
        file.writelines(f"{n},{loss},{n},0.001,1,{START + n},0,{launch}\n" for n, loss in losses)
    for step in range(500, steps + 1, 500):
        told.commit(step, at=step)
    runs.write_journal(run, told.records)
    fields = {"nodes": told.nodes, "attempt": 0, "launch": launch, "total_steps": 2 * steps}
    runs.write_status(run, step=steps, updated_at=START + steps, **fields)
    return told


def test_a_long_run_on_512_ranks_stays_small(run: RunDirectory) -> None:
    """100,000 steps: what is sent and drawn does not grow with them; what is new is read alone."""
    told = long_run(run)
    launch = told.state.launch.number

    with served(run) as viewer:
        page, first = viewer.ask().body, viewer.news()
        with (run.path / "metrics.csv").open("a") as file:
            file.write(f"100001,3.0,1,0.001,1,{START + 100_001},0,{launch}\n")
        runs.write_status(run, step=100_001, nodes=told.nodes, attempt=0, total_steps=200_000)
        news = viewer.news(first["version"])

    points = sum(len(each.split()) for each in re.findall(r'<polyline class="\w+" points="([^"]*)"', page))
    assert 300 < points <= 2000
    assert len(page) < 100_000
    assert "100,001 of 200,000" in news["parts"]["now"]
    assert len(json.dumps(news)) < 50_000
    assert "64 nodes of the newest attempt, 8 GPUs each: 64 in use. 34 more are left out here." in page
    assert "512 ranks running. Each square is a rank." in page
    assert page.count('<li class="w-in_use"') == 64
    assert 'title="gpu0063, in use: ranks 504 to 511: 8 running"' in page


# --- where it listens, and the command ------------------------------------------------------------


def asked_by_socket(path: Path, token: str) -> bytes:
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(WITHIN_S)
        caller.connect(str(path))
        caller.sendall(f"GET /{token}/page.json HTTP/1.1\r\nHost: localhost:8265\r\n\r\n".encode())
        said = b""
        while part := caller.recv(65536):
            said += part
        return said


def test_a_socket_is_for_this_account_alone(run: RunDirectory, tmp_path: Path) -> None:
    runs.write_status(run)
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:  # of a server that was killed
        dead.bind(str(path))
    server, token = web.listen(run, socket_path=path)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert b'"parts": ' in asked_by_socket(path, token)
        assert b"403" in asked_by_socket(path, "wrong").splitlines()[0]
        with pytest.raises(StepkeeperError, match="already in use"):
            web.listen(run, socket_path=path)
        assert b'"parts": ' in asked_by_socket(path, token), "the one that listens was left alone"
    finally:
        server.shutdown()
        thread.join(WITHIN_S)
        server.server_close()
    assert not path.exists()


def test_a_name_that_is_taken_or_too_long_is_refused(run: RunDirectory, tmp_path: Path, command: Command) -> None:
    runs.write_status(run)
    (tmp_path / "file").write_text("mine")
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        places = [("--socket", tmp_path / "file"), ("--socket", tmp_path / ("x" * 200))]
        for argv in (*places, ("--port", taken), ("--port", 70_000)):
            said = command("status", run.path, "--web", *argv)
            assert said.code == ExitCode.USAGE, argv
            assert argv[0] in said.err
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("argv", [("--web", "--json"), ("--web", "--follow"), ("--web", "--all"), ("--port", "1")])
def test_options_that_go_without_each_other(command: Command, argv: tuple[str, ...]) -> None:
    said = command("status", *argv)

    assert said.code == ExitCode.USAGE
    assert "--web" in said.err


def test_a_run_that_is_not_there(command: Command, tmp_path: Path) -> None:
    said = command("status", tmp_path / "no-run", "--web")

    assert said.code == ExitCode.NOTHING_FOUND
    assert "no such directory" in said.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_says_how_to_open_it_and_ends_quietly(run: RunDirectory, number: signal.Signals) -> None:
    runs.write_status(run)
    argv = [sys.executable, "-m", "stepkeeper", "status", "--web", str(run.path)]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509 - else it is ignored
    ) as process:  # fmt: skip
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(5)]
        match = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([\w-]+)/\n", lines[0])
        assert match is not None
        assert f"ssh -N -L {match[1]}:127.0.0.1:{match[1]} " in lines[3]
        assert "my-run" in Viewer(int(match[1]), match[2]).ask().body
        process.send_signal(number)
        out, err = process.communicate(timeout=WITHIN_S)

    assert (process.returncode, out, err) == (0, "", "")

"""What went wrong in a run, or nearly: the journal's records that a person wants to know of.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from stepkeeper.core.causes import SkippedData
from stepkeeper.core.reason_text import text
from stepkeeper.seeing.model import Incident, left_out_in_words
from stepkeeper.store.journal import Record

INCIDENTS_MAX = 5_000  # the oldest are left out beyond it, and counted


class Incidents(msgspec.Struct, kw_only=True):
    """Collects them, bounded."""

    found: list[Incident] = msgspec.field(default_factory=list)
    left_out: int = 0
    losses: dict[int, int] = msgspec.field(default_factory=dict)  # by attempt: nodes lost so far
    windows: int = 0  # of data that is left out, so far

    def take(self, record: Record, at: int, launch: int | None) -> None:
        """Look at one record, which came at `at` (microseconds) in a launch."""
        lost = record.node_losses > self.losses.get(record.attempt, record.node_losses)
        self.losses[record.attempt] = record.node_losses
        new = record.skipped_data[self.windows :]  # an attempt takes over those of the one before
        self.windows = max(self.windows, len(record.skipped_data))
        found = ((*said, False) for said in (*_of(record, lost=lost), *_windows(new)))
        for kind, what, node, is_all in (*_told(record), *found):
            if len(self.found) >= INCIDENTS_MAX:
                del self.found[0]
                self.left_out += 1
            decided = record.why if not is_all else _ordered(record)
            self.found.append(
                Incident(at=at, attempt=record.attempt, launch=launch, kind=kind, what=what, decided=decided, node=node)
            )


def _of(record: Record, *, lost: bool) -> Iterator[tuple[str, str, str]]:  # noqa: C901, PLR0912 - one case an event
    """Yield (kind, what, node)."""
    event = record.event
    match event:
        case on.NodeFaulted():
            gpu = f" ({event.gpu})" if event.gpu else ""
            drained = "; drained by the agent" if event.drained else ""
            yield "node fault", f"{event.name}{gpu}: {event.why}{drained}", event.node
        case on.NodesCleared() if event.unfit:
            yield from (("not fit", unfit.why, unfit.node) for unfit in event.unfit)
        case on.SaveFailed():
            yield "save failed", f"step {event.step}: {event.error}", ""
        case on.CheckpointCommitted() if event.drift:
            yield "copies differ", f"step {event.step}: {event.drift}", ""
        case on.CheckpointChosen():
            for skipped in event.skipped:
                yield "step damaged", f"{name_of(skipped.directory)}: {skipped.problem}", ""
        case on.CheckpointVerified() if not event.ok:
            yield "step damaged", f"{name_of(event.directory)}: {event.problem}", ""
        case on.RolledBack():
            yield "rolled back", event.error or f"to step {event.step or 0}", ""
        case on.ChoiceFailed():
            yield "storage", event.error, ""
        case on.PartFailed():
            yield "part failed", f"{event.part}: {event.error}", ""
        case on.RunDirectoryGone():
            yield "storage", f"the run directory is gone: {event.path}", ""
        case on.Superseded():
            yield "superseded", f"job {event.by_job_id}, restart {event.by_restart_count}, holds the lease", ""
        case _ if lost:
            yield "node lost", record.why, ""
        case _:
            return


def _windows(windows: Iterable[SkippedData]) -> Iterator[tuple[str, str, str]]:
    for window in windows:
        yield "data left out", left_out_in_words(window.step, window.steps), ""


def _ordered(record: Record) -> str:
    """Say what followed, where the decision says no more than the incident itself."""
    return "the launch was ended" if any(isinstance(each, do.KillRanks) for each in record.effects) else "told"


def _told(record: Record) -> Iterator[tuple[str, str, str, bool]]:
    """Yield (kind, what, node, whether the decision says no more than that)."""
    for reason in record.reasons if isinstance(record.event, on.Progressed) else ():
        if isinstance(reason, because.LossWrong):
            yield "loss", text((reason,)), "", record.reasons == (reason,)
    for effect in record.effects:
        if isinstance(effect, do.ReportSlowNode) and effect.loading:
            yield "slow data loader", text(effect.reasons), effect.node, effect.reasons == record.reasons
        elif isinstance(effect, do.ReportSlowNode) and not effect.over:
            yield "slow node", f"{effect.factor:.2f} times as long for a step as the others", effect.node, False
        elif isinstance(effect, do.ReportSlowLaunch):
            node = effect.nodes[0] if effect.nodes else ""
            yield "slow launch", text(effect.reasons), node, effect.reasons == record.reasons
        elif isinstance(effect, do.ReportReplay) and not effect.equal:
            node = effect.nodes[0] if effect.nodes else ""
            yield "replay differs", text(effect.reasons), node, effect.reasons == record.reasons


def name_of(directory: str) -> str:
    """Return the last part of a step directory's path."""
    return directory.rstrip("/").rpartition("/")[2]

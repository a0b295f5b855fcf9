"""A training that saves by `torch.save`, for torchrun, ft_launcher, submitit and plain srun."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import loop
import marks
import torch
import torch.distributed as dist

FILE = Path(os.environ["RECOVERY_DIR"]) / "checkpoint.pt"
MONITOR_FROM_STEPS = 25  # after the first save: its interval is among those that the time limits are made of


def main(argv: list[str] | None = None) -> None:
    """Train to the end, or until a signal asks to stop."""
    options = loop.parse_options(argv)
    asked = torch.zeros(1)
    if options.stop_on_signal:
        signal.signal(signal.SIGUSR1, lambda *_: asked.fill_(1))
    for ours, slurms in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS")):
        os.environ.setdefault(ours, os.environ.get(slurms, ""))
    dist.init_process_group("gloo")  # its time limit is torch's own: 30 minutes
    training = loop.Loop(options)
    monitor = begin_monitoring() if options.heartbeats else None
    if FILE.exists():
        resume(training, monitor)
    marks.began(training.rank)
    while training.done < options.steps:
        started_at = time.monotonic()
        loss = training.train_step()
        marks.stepped(training.rank, training.done)
        if monitor is not None:
            monitor.send_heartbeat()
            if training.done == MONITOR_FROM_STEPS:
                monitor.calculate_and_set_hb_timeouts()
        stop = options.stop_on_signal and agreed(asked)
        if stop or training.done % options.checkpoint_every_steps == 0:
            save(training, {"monitor": monitor.state_dict()} if monitor is not None else {})
        if stop:
            break
        if training.rank == 0 and training.done % 10 == 0:
            print(f"step {training.done} loss {loss:.4f}", flush=True)
        time.sleep(max(0.0, options.step_seconds_min - (time.monotonic() - started_at)))
    dist.destroy_process_group()


def resume(training: loop.Loop, monitor: Any) -> None:
    """Go on from the file, with the time limits that were calculated before."""
    state = torch.load(FILE, map_location="cpu", weights_only=True)
    training.load(state)
    if monitor is not None:
        monitor.load_state_dict(state["monitor"])


def save(training: loop.Loop, more: dict[str, Any]) -> None:
    """Replace the file by the state of now."""
    state = training.state() | more
    if training.rank == 0:
        torch.save(state, FILE.with_suffix(".new"))
        os.replace(FILE.with_suffix(".new"), FILE)


def agreed(asked: torch.Tensor) -> bool:
    """Tell whether any rank was asked to stop."""
    together = asked.clone()
    dist.all_reduce(together, op=dist.ReduceOp.MAX)
    return bool(together.item())


def begin_monitoring() -> Any:
    """Return the client of ft_launcher's monitor of this rank."""
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient  # noqa: PLC0415 - of that way alone

    client = RankMonitorClient()
    client.init_workload_monitoring()
    return client


if __name__ == "__main__":
    main()

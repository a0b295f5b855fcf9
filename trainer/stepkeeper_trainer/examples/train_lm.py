"""Reference training script: a byte-level language model that can be stopped and resumed anywhere.

Runs alone, under torchrun, and under srun.  The lines that mention `manager` are all it takes to adopt
Stepkeeper; everything else is ordinary PyTorch.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts: repeatable matrix products
if __name__ == "__main__":
    gc.disable()  # nothing that is imported is ever garbage: a start takes a sixth less of a core

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from stepkeeper_trainer import CheckpointManager, GlobalSampler, StepkeeperError, accumulation_steps, start_distributed
from stepkeeper_trainer.environment import Place
from stepkeeper_trainer.errors import UsageError
from stepkeeper_trainer.examples.transformer import Corpus, ModelSize, Transformer


@dataclass(frozen=True, slots=True)
class Training:
    """What a step works with."""

    model: Transformer
    optimizer: torch.optim.Optimizer
    sampler: GlobalSampler
    corpus: Corpus
    options: argparse.Namespace
    place: Place
    device: torch.device
    manager: CheckpointManager


def main() -> None:
    """Train until the steps are done or somebody asks to stop."""
    options = parse_options()
    # The rank is known from the environment before the ranks have met: logs of rank 0 only, errors of all.
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s", level=logging.WARNING, stream=sys.stderr)
    try:
        place = start_distributed()
        check(options, place)
    except StepkeeperError as error:
        sys.stderr.write(f"train_lm: error: {error}\n")
        sys.exit(error.exit_code)
    if place.rank == 0:
        logging.getLogger("stepkeeper_trainer").setLevel(logging.INFO)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(mode=True)
    torch.manual_seed(options.seed)

    corpus = Corpus(options.context, bytes_max=options.corpus_bytes)
    sampler = GlobalSampler(len(corpus), seed=options.seed, fingerprint=corpus.fingerprint)
    size = ModelSize(
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        context=options.context,
        dropout=options.dropout,
    )
    model = Transformer(size, device).to(device)
    if place.world_size > 1:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, options))

    manager = CheckpointManager(
        {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler},
        every=options.checkpoint_every or options.checkpoint_every_steps,
        run_dir=options.run_dir,
        resume_from=options.resume_from,
        retention=options.retention,
        total_steps=options.steps,
        seed=options.seed,
        attach_signals=True,  # SIGTERM and SIGUSR1 save and stop, outside Slurm too
        attach_excepthook=True,  # an error of the library ends the program with its exit code, and no traceback
    )
    training = Training(model, optimizer, sampler, corpus, options, place, device, manager)
    manager.resume()
    gc.freeze()
    gc.enable()
    # The iterator of a DataLoader is made here, and `manager.restore_random_state()` comes next: making it draws.
    if options.save_at_start:
        manager.save()
    for step in manager.steps():
        started_at = time.monotonic()
        loss, grad_norm = train_step(training, step)
        lr = scheduler.get_last_lr()[0]
        scheduler.step()
        sampler.advance(options.batch)
        time.sleep(max(0.0, options.step_seconds_min - (time.monotonic() - started_at)))
        tokens = options.batch * options.context
        done = manager.step_done(loss=loss, tokens=tokens, lr=lr, grad_norm=grad_norm)
        if place.rank == 0 and (manager.step % options.print_every_steps == 0 or done):
            print(
                f"step {manager.step}/{options.steps} loss {loss:.4f} tokens {manager.tokens} lr {lr:.2e}",
                flush=True,
            )
    code = manager.finish()
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(code)


def train_step(training: Training, step: int) -> tuple[float, float]:
    """Do one optimizer step over the global batch; return its mean loss and the gradient's norm."""
    model, options, place = training.model, training.options, training.place
    micro_batches = options.batch // options.micro_batch
    own = range(place.rank, micro_batches, place.world_size)
    total = torch.zeros((), dtype=torch.float64)

    def compute(index: int) -> torch.Tensor:
        micro_batch = own[index]
        if isinstance(model, FSDPModule):  # gradients cross ranks once a step, with the last micro-batch
            model.set_requires_gradient_sync(index == len(own) - 1)
        model.dropout.key(options.seed, step, micro_batch)
        samples = training.sampler.micro_batch(micro_batch, options.micro_batch)
        loss = model(*training.corpus.batch(samples, training.device))
        (loss / len(own)).backward()
        mean: torch.Tensor = loss.detach().double().cpu()
        return mean

    for index in range(len(own)):
        # the first one may be computed twice, to find a GPU that computes wrongly (--confirm-every of `stepkeeper run`)
        total += compute(index) if index else training.manager.confirm(lambda: compute(0))
    if place.world_size > 1:
        dist.all_reduce(total)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
    grad_norm: torch.Tensor = norm.full_tensor() if isinstance(norm, DTensor) else norm
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=True)
    return float(total.item()) / micro_batches, float(grad_norm.item())


def schedule(step: int, options: argparse.Namespace) -> float:
    """Return the factor of the learning rate: linear warm-up, then a cosine down to a tenth."""
    if step < options.warmup_steps:
        return (step + 1) / int(options.warmup_steps)
    progress = min(1.0, (step - options.warmup_steps) / max(1, options.steps - options.warmup_steps))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def check(options: argparse.Namespace, place: Place) -> None:
    """Refuse settings that cannot work.  Raises UsageError."""
    accumulation_steps(options.batch, options.micro_batch, place.world_size)
    if options.width % options.heads:
        raise UsageError(f"--width {options.width} is no multiple of --heads {options.heads}")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--run-dir", type=Path, help="where checkpoints and metrics.csv go; else STEPKEEPER_RUN_DIR, else below runs/")
    add("--resume-from", help="a step directory, or `latest`; else STEPKEEPER_RESUME_FROM")
    add("--steps", type=positive, default=200, help="optimizer steps of the whole run")
    add("--seed", type=int, default=0, help="of weights, data order and dropout")
    add("--checkpoint-every-steps", type=positive, default=50, help="steps between saves")
    add(
        "--checkpoint-every",
        help="`500 steps`, `30 min`, `auto`, or several joined by `or`; counts before the option above",
    )
    add("--retention", default="all", help="which steps are kept, such as `newest 3, every 1000 steps, best loss 2`")
    add("--save-at-start", action="store_true", help="save before the first step too: tries the storage")
    add("--batch", type=positive, default=16, help="samples of one optimizer step, of all ranks together")
    add("--micro-batch", type=positive, default=4, help="samples of one forward pass; the rest is accumulated")
    add("--layers", type=positive, default=4, help="transformer blocks")
    add("--width", type=positive, default=128, help="of the residual stream")
    add("--heads", type=positive, default=4, help="of attention")
    add("--context", type=positive, default=64, help="bytes of one sample")
    add("--dropout", type=float, default=0.1, help="probability")
    add("--lr", type=float, default=1e-3, help="peak learning rate")
    add("--warmup-steps", type=positive, default=20, help="steps of linear warm-up")
    add("--clip", type=float, default=1.0, help="norm that gradients are clipped to")
    add("--corpus-bytes", type=positive, default=4_000_000, help="of the standard library to learn")
    add("--threads", type=int, default=default_threads(), help="of torch on the CPU; 0 leaves them alone")
    add("--step-seconds-min", type=float, default=0.0, help="slows steps down, for demonstrations")
    add("--print-every-steps", type=positive, default=10, help="steps between lines of progress")
    return parser.parse_args()


def default_threads() -> int:
    """Return one thread on a CPU (losses depend on their number), unless the user has said otherwise."""
    return 0 if "OMP_NUM_THREADS" in os.environ or torch.cuda.is_available() else 1


def positive(text: str) -> int:
    """Read a number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


if __name__ == "__main__":
    main()

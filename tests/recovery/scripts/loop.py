"""The model, the data and the step of `train_lm`, without a line of Stepkeeper's saving: for the other ways."""

import argparse
import math

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard

from stepkeeper_trainer.examples.transformer import Corpus, ModelSize, Transformer
from stepkeeper_trainer.sampler import GlobalSampler

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
CPU = torch.device("cpu")


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the options that `train_lm` takes too."""
    parser = argparse.ArgumentParser()
    for name, kind, default in (
        ("steps", int, 200), ("seed", int, 0), ("checkpoint-every-steps", int, 50), ("batch", int, 16),
        ("micro-batch", int, 4), ("layers", int, 4), ("width", int, 128), ("heads", int, 4), ("context", int, 64),
        ("dropout", float, 0.1), ("lr", float, 1e-3), ("warmup-steps", int, 20), ("clip", float, 1.0),
        ("corpus-bytes", int, 4_000_000), ("step-seconds-min", float, 0.0),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_argument("--stop-on-signal", action="store_true")
    parser.add_argument("--heartbeats", action="store_true")
    return parser.parse_args(argv)


def prepare(options: argparse.Namespace) -> tuple[Transformer, Corpus, GlobalSampler]:
    """Return model, data and order of the data, as `train_lm` makes them."""
    torch.set_num_threads(1)
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
    return Transformer(size, CPU), corpus, sampler


def schedule(step: int, options: argparse.Namespace) -> float:
    """Return the factor of the learning rate."""
    if step < options.warmup_steps:
        return (step + 1) / int(options.warmup_steps)
    progress = min(1.0, (step - options.warmup_steps) / max(1, options.steps - options.warmup_steps))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


class Loop:
    """A sharded training whose state is one dictionary, complete on every rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.model, self.corpus, self.sampler = prepare(options)
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: schedule(step, options))
        self.done = 0

    def train_step(self) -> float:
        """Do one optimizer step over the global batch, and return its mean loss."""
        options = self.options
        micro_batches = options.batch // options.micro_batch
        own = range(self.rank, micro_batches, self.world_size)
        total = torch.zeros((), dtype=torch.float64)
        for index, micro_batch in enumerate(own):
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(index == len(own) - 1)
            self.model.dropout.key(options.seed, self.done, micro_batch)
            samples = self.sampler.micro_batch(micro_batch, options.micro_batch)
            loss = self.model(*self.corpus.batch(samples, CPU))
            (loss / len(own)).backward()
            total += loss.detach().double()
        dist.all_reduce(total)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), options.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()
        self.sampler.advance(options.batch)
        self.done += 1
        return float(total.item()) / micro_batches

    def state(self) -> dict[str, object]:
        """Collect everything on every rank."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=WHOLE)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": self.scheduler.state_dict(),
            "sampler": self.sampler.state_dict(),
            "done": self.done,
        }

    def load(self, state: dict[str, object]) -> None:
        """Go on from what `state` returned."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=WHOLE,
        )
        self.scheduler.load_state_dict(state["scheduler"])
        self.sampler.load_state_dict(state["sampler"])
        self.done = int(state["done"])

"""A small decoder-only transformer over bytes, whose dropout does not depend on how many ranks there are; and its text.

The text that the reference script learns is the Python standard library, which is always there.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import nn
from torch.nn import functional

from stepkeeper_trainer.sampler import mix

_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"})


class Corpus:
    """Bytes cut into overlapping pieces of `length` + 1: the input, and the same one byte on."""

    def __init__(self, length: int, *, bytes_max: int) -> None:
        """Read sorted `*.py` files until there are `bytes_max` bytes."""
        data = _read(bytes_max)
        self.fingerprint = f"{xxhash.xxh3_128_hexdigest(data)}/{length}"
        self._data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._length = length

    def __len__(self) -> int:
        return (len(self._data) - 1) // self._length

    def batch(self, indices: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of these pieces, each (len(indices), length)."""
        pieces = [self._data[i * self._length : (i + 1) * self._length + 1] for i in indices]
        batch = torch.stack(pieces).long().to(device)
        return batch[:, :-1], batch[:, 1:]


def _read(bytes_max: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    for path in _sources(Path(sysconfig.get_paths()["stdlib"])):
        try:
            parts.append(path.read_bytes())
        except OSError:
            continue  # not readable for this user: the fingerprint tells one set of files from another
        size += len(parts[-1])
        if size >= bytes_max:
            break
    return b"".join(parts)[:bytes_max]


def _sources(directory: Path) -> Iterator[Path]:
    """Yield `*.py` files in the order of their paths; a directory is read only as it is reached."""
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError:
        return  # not readable for this user, as above
    for entry in entries:
        if entry.name in _LEFT_OUT:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _sources(Path(entry.path))
        elif entry.name.endswith(".py"):
            yield Path(entry.path)


VOCABULARY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """How large the model is."""

    layers: int
    width: int
    heads: int
    context: int
    dropout: float


class KeyedDropout(nn.Module):
    """Dropout from a generator that is seeded for each global micro-batch, not for each rank."""

    def __init__(self, probability: float, device: torch.device) -> None:
        super().__init__()
        self._probability = probability
        self._generator = torch.Generator(device)

    def key(self, seed: int, step: int, micro_batch: int) -> None:
        """Choose the masks of one micro-batch of one step."""
        self._generator.manual_seed(mix(mix(mix(seed + 1) ^ (step + 1)) ^ (micro_batch + 1)) >> 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop and scale."""
        if not self.training or self._probability == 0.0:
            return x
        keep = 1.0 - self._probability
        mask = torch.empty_like(x).bernoulli_(keep, generator=self._generator)
        return x * mask / keep


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, size: ModelSize, dropout: KeyedDropout) -> None:
        super().__init__()
        self._heads = size.heads
        self.attention_norm = nn.LayerNorm(size.width)
        self.attention_in = nn.Linear(size.width, 3 * size.width)
        self.attention_out = nn.Linear(size.width, size.width)
        self.mlp_norm = nn.LayerNorm(size.width)
        self.mlp_in = nn.Linear(size.width, 4 * size.width)
        self.mlp_out = nn.Linear(4 * size.width, size.width)
        self._dropout = [dropout]  # in a list: shared by all blocks, a submodule of none

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, time, width) to the same."""
        batch, time, width = x.shape
        heads = (batch, time, self._heads, width // self._heads)
        query, key, value = self.attention_in(self.attention_norm(x)).split(width, dim=-1)
        attended = functional.scaled_dot_product_attention(
            query.view(heads).transpose(1, 2),
            key.view(heads).transpose(1, 2),
            value.view(heads).transpose(1, 2),
            is_causal=True,
        )
        attended = attended.transpose(1, 2).reshape(batch, time, width)
        x = x + self._dropout[0](self.attention_out(attended))
        hidden = functional.gelu(self.mlp_in(self.mlp_norm(x)))
        mlp: torch.Tensor = self._dropout[0](self.mlp_out(hidden))
        return x + mlp


class Transformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self, size: ModelSize, device: torch.device) -> None:
        super().__init__()
        self.dropout = KeyedDropout(size.dropout, device)
        self.token = nn.Embedding(VOCABULARY, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList([Block(size, self.dropout) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of (batch, time) bytes."""
        x = self.token(inputs) + self.position(torch.arange(inputs.shape[1], device=inputs.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss: torch.Tensor = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss

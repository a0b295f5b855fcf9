"""A small decoder-only transformer over bytes; its dropout does not depend on how many ranks there are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from stepkeeper_trainer.sampler import mix

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

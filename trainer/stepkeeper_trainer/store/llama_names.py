"""Names of Llama-family models: those of a training script's own model, and Hugging Face's.  Needs no torch.

Hugging Face's rotary embedding turns the two halves of a head against each other, Meta's turns neighbours: the rows of
the query and key projections of each head stand in another order there.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

_LAYER = re.compile(r"(?<=layers\.)\d+(?=\.)")
_COMMON = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.{}.attention.wo.weight": "model.layers.{}.self_attn.o_proj.weight",
    "layers.{}.feed_forward.w1.weight": "model.layers.{}.mlp.gate_proj.weight",
    "layers.{}.feed_forward.w2.weight": "model.layers.{}.mlp.down_proj.weight",
    "layers.{}.feed_forward.w3.weight": "model.layers.{}.mlp.up_proj.weight",
    "layers.{}.attention_norm.weight": "model.layers.{}.input_layernorm.weight",
    "layers.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "norm.weight": "model.norm.weight",
}


def _projections(below: str) -> dict[str, str]:
    return {f"layers.{{}}.attention.{below}w{p}.weight": f"model.layers.{{}}.self_attn.{p}_proj.weight" for p in "qkv"}


STYLES = {
    "torchtitan": {**_COMMON, **_projections("qkv_linear."), "lm_head.weight": "lm_head.weight"},
    "meta": {**_COMMON, **_projections(""), "output.weight": "lm_head.weight"},
}
"""Names of a style to Hugging Face's.  `torchtitan`: of 0.3; `meta`: Meta's, and torchtitan's before."""
_TURNED = re.compile(r"model\.layers\.\d+\.self_attn\.[qk]_proj\.weight")
_COMPUTED = re.compile(r"(?:.*\.)?(?:rope\.freqs|freqs_cis|rotary_emb\.inv_freq)")  # from the configuration alone


class NamesError(ValueError):
    """A name is not of the style, or the head's size is not known."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one style, and the rows of a head."""

    style: str
    head_dim: int

    def to_hf(self, name: str) -> str | None:
        """Return Hugging Face's name; None for a value that is computed from the configuration.

        >>> Names("meta", 64).to_hf("layers.3.attention.wq.weight")
        'model.layers.3.self_attn.q_proj.weight'

        Raises:
            NamesError: the style has no such name.
        """
        return _renamed(name, STYLES[self.style], self.style)

    def from_hf(self, name: str) -> str | None:
        """Return the style's name of one of Hugging Face's; otherwise as `to_hf`.

        >>> Names("meta", 64).from_hf("lm_head.weight")
        'output.weight'
        """
        return _renamed(name, {theirs: ours for ours, theirs in STYLES[self.style].items()}, "Hugging Face's Llama")

    def rows_of(self, hf_name: str) -> int:
        """Return how many rows of a tensor are put in another order together; 0: none."""
        return self.head_dim if _TURNED.fullmatch(hf_name) else 0


def _renamed(name: str, names: dict[str, str], style: str) -> str | None:
    if _COMPUTED.fullmatch(name):
        return None
    layer = _LAYER.search(name)
    found = names.get(_LAYER.sub("{}", name, count=1))
    if found is None:
        raise NamesError(f"{name}: the {style} style has no such name: choose another --names, or --prefix")
    return found.format(layer[0]) if layer else found


def head_dim_of(config: Path) -> int:
    """Return the rows of a head, as a `config.json` of Hugging Face says.

    Raises:
        NamesError: it does not say it.
        OSError: it cannot be read.
    """
    try:
        said = json.loads(config.read_bytes())
        rows = said.get("head_dim") or said["hidden_size"] // said["num_attention_heads"]
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise NamesError(f"{config}: has no hidden_size and num_attention_heads: name --head-dim") from error
    return check_head_dim(rows)


def check_head_dim(rows: object) -> int:
    """Return a number of rows that a rotary embedding can have.  Raises NamesError."""
    if type(rows) is not int or rows <= 0 or rows % 2:
        raise NamesError(f"a head of {rows!r} rows has no two halves: name --head-dim")
    return rows


def halves(block: bytes | bytearray, row_bytes: int, rows: int) -> bytearray:
    """Return whole heads with their rows in Hugging Face's order: the even ones first.

    >>> halves(bytes([0, 1, 2, 3, 10, 11, 12, 13]), 1, 4).hex()
    '000201030a0c0b0d'
    """
    result = bytearray(len(block))
    view, out = memoryview(block), memoryview(result)
    for head in range(0, len(block), rows * row_bytes):
        for place in range(rows):
            row = 2 * place if place < rows // 2 else 2 * (place - rows // 2) + 1
            at, to = head + row * row_bytes, head + place * row_bytes
            out[to : to + row_bytes] = view[at : at + row_bytes]
    return result

"""Names of parameters and buffers, without what wraps a module."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


@lru_cache(maxsize=1 << 20)
def plain_name(name: str) -> str:
    """Return a parameter's name without what DDP, compile and activation checkpointing wrap around it.

    >>> plain_name("module._orig_mod.blocks.0.weight")
    'blocks.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@lru_cache(maxsize=16)
def plain_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return plain names; a name keeps its wrappers' words where another one would be called the same without.

    >>> plain_names(("module.head", "module.body")), plain_names(("module.head", "head"))
    (('head', 'body'), ('module.head', 'head'))
    """
    plain = [plain_name(name) for name in names]
    count = Counter(plain)
    return tuple(short if count[short] == 1 else name for name, short in zip(names, plain, strict=True))


@lru_cache(maxsize=16)
def keys_of(prefix: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keys under which values of these names are saved."""
    return tuple(f"{prefix}{name}" for name in plain_names(names))

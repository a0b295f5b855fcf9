"""Names of parameters and buffers, without what wraps a module."""

from __future__ import annotations

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
def keys_of(prefix: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keys under which values of these names are saved."""
    return tuple(f"{prefix}{plain_name(name)}" for name in names)

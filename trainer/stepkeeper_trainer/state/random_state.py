"""The random generators of a rank: Python's, NumPy's, torch's for CPU and GPUs, as uint8 tensors.

`cuda` is that of the current GPU, and `cuda+1` that of the next one, where the process uses that too: a rank may get
other GPUs of its node when it is resumed.

Generators of ranks that the checkpoint never had (a larger world) are derived from (seed, step, rank).
"""

from __future__ import annotations

import hashlib
import importlib
import random
import sys
from typing import Any

import torch
import xxhash

from stepkeeper_trainer.buffers import view_bytes
from stepkeeper_trainer.log import say
from stepkeeper_trainer.state.tree import from_blob, join, split, to_blob

_OURS = "_stepkeeper_state"  # attribute of a tensor
_CUDA = "cuda"


def collect() -> dict[str, torch.Tensor]:
    """Return the state of every generator of this process."""
    return as_tensors(capture())


def capture() -> dict[str, Any]:
    """Return the state of every generator as the generator gives it: quickly."""
    found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy"] = numpy.random.get_state(legacy=True)
    if torch.cuda.is_available():
        found |= _collect_cuda()
    for state in found.values():
        if isinstance(state, torch.Tensor):
            setattr(state, _OURS, True)
    return found


def as_tensors(captured: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return what `capture` has found as uint8 tensors."""
    found = dict(captured)
    found["python"] = to_blob(split(captured["python"], "python", {}))
    if "numpy" in captured:
        kind, keys, position, has_gauss, gauss = captured["numpy"]
        found["numpy"] = to_blob([kind, [int(key) for key in keys], int(position), int(has_gauss), float(gauss)])
    for tensor in found.values():
        setattr(tensor, _OURS, True)
    return found


def is_ours(state: torch.Tensor) -> bool:
    """Whether `collect` has made this tensor, and not the script."""
    return hasattr(state, _OURS)


def peek() -> dict[str, bytes]:
    """Return the state of torch's own generators: a few microseconds, and no wait for a GPU."""
    found = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found |= _collect_cuda()
    return {name: bytes(view_bytes(state)) for name, state in found.items()}


def digests() -> dict[str, str]:
    """Return a hash of the state of each generator."""
    return {name: xxhash.xxh3_64_hexdigest(view_bytes(state)) for name, state in collect().items()}


def restore(found: dict[str, torch.Tensor]) -> None:
    """Put every generator back; nothing may draw from them between this and the next step."""
    random.setstate(_tupled(join(from_blob(found["python"], name="Python's RNG"), {})))
    torch.set_rng_state(found["torch"])
    if "numpy" in found:
        _restore_numpy(found["numpy"])
    if torch.cuda.is_available():
        _restore_cuda({name: state for name, state in found.items() if name.startswith(_CUDA)})


def name_of(device: int, current: int, count: int) -> str:
    """Return the name of a GPU's generator, seen from the current GPU of `count`."""
    ahead = (device - current) % count
    return f"{_CUDA}+{ahead}" if ahead else _CUDA


def device_of(name: str, current: int, count: int) -> int | None:
    """Return the GPU whose generator has that name; None where there are too few."""
    ahead = int(name.removeprefix(_CUDA) or 0)
    return (current + ahead) % count if ahead < count else None


def _collect_cuda() -> dict[str, torch.Tensor]:
    """Return the generators of the current GPU and of each that this process uses: which has a context there.

    A state is two numbers in the host's memory: reading it makes no context.
    """
    here = torch.cuda.get_rng_state()
    current, generators = torch.cuda.current_device(), torch.cuda.default_generators
    count = len(generators)
    used = (n for n in range(count) if n != current and _has_context(n))
    return {_CUDA: here} | {name_of(n, current, count): generators[n].get_state() for n in used}


def _has_context(device: int) -> bool:
    """Whether this process uses a GPU; asking makes no context there."""
    return bool(torch._C._cuda_hasPrimaryContext(device))  # type: ignore[attr-defined]  # noqa: SLF001  # pinned by a test


def _restore_cuda(found: dict[str, torch.Tensor]) -> None:
    for name, state in found.items():
        device = device_of(name, torch.cuda.current_device(), torch.cuda.device_count())
        if device is None:
            say("rng_left_out", generator=name, why="this rank sees fewer GPUs than where the checkpoint was made")
        else:
            torch.cuda.set_rng_state(state, device)


def _restore_numpy(saved: torch.Tensor) -> None:
    try:
        numpy = importlib.import_module("numpy")
    except ImportError:  # then nothing here draws from it: torch imports NumPy wherever it is installed
        say("rng_left_out", generator="numpy", why="NumPy is not installed here; it was where the checkpoint was made")
        return
    kind, keys, position, has_gauss, gauss = from_blob(saved, name="NumPy's RNG")
    # the legacy generator is the one that scripts share
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss))


def derive(seed: int, step: int, rank: int) -> int:
    """Seed every generator of a rank that the checkpoint does not know; return the seed."""
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=4).digest()
    value = int.from_bytes(digest, "little")
    random.seed(value)
    torch.manual_seed(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value)
    return value


def _tupled(state: Any) -> Any:
    version, internal, gauss = state
    return (version, tuple(internal), gauss)

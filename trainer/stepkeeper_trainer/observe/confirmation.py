"""Silent corruption: every few steps the first micro-batch is computed twice on each rank, and compared bit for bit.

The computations of a check leave no trace: gradients, buffers and random generators are put back, so a run with checks
has the same bits as one without.  What is compared is what this rank computed itself: the loss, and each gradient as
the backward pass hands it over, before any reduction over ranks.  So the rank that differs is the one that is wrong.

Most runs are not deterministic, and nothing says so beforehand.  The first check of a launch computes several times on
all ranks: where any of them differs, the run is left alone, and the log says it once.  A rank that differs later has
all ranks compute again, and it alone is blamed only while most ranks come to the same bits each time.

Checks at the same step on all ranks agree what came of them.  A step is confirmed when all ranks were equal at it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from stepkeeper_trainer.buffers import view_bytes
from stepkeeper_trainer.coordinate.agreement import Agreement, Call
from stepkeeper_trainer.errors import CorruptionError, UsageError
from stepkeeper_trainer.formats.manifest import CONFIRMED
from stepkeeper_trainer.formats.messages import Corrupted, shorten
from stepkeeper_trainer.log import warn
from stepkeeper_trainer.state import random_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from stepkeeper_trainer.link import Link
    from stepkeeper_trainer.load.resume import Resumed
    from stepkeeper_trainer.state import TrainingState


FIRST_TIMES = 4  # computations of the first check, and of the look after a difference
TIMES = 2
COLUMNS = 256  # sums over a tensor's bits: one wrong bit changes one of them
SAID_WITHIN_S = 2.0  # a watcher takes the word before any rank ends
NAMES_MAX = 3
STEPS_UNCALLED = 2  # without a call: then the script has none
LOSS = "the loss"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number

Digests = dict[str, bytes]


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a rank found in a check."""

    differs: bool
    promised: bool = True  # torch's deterministic algorithms are on
    what: str = ""
    node: str = ""
    gpu: str = ""


def choose_every(environment: str | None, every: int | None) -> int | None:
    """Return the steps between checks: the environment's, else the script's; None: no check.  Raises UsageError."""
    chosen = environment if environment is not None else every
    if chosen is None:
        return None
    text = str(chosen)
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise UsageError(f"confirm_every={text}: give a number of steps from 1 on, or leave it out")
    return int(text)


def begin_confirmation(
    every: int | None, resumed: Resumed, *, state: TrainingState, agreement: Agreement, link: Link, rank: int, node: str
) -> Confirmation | None:
    """Begin to confirm steps, if that is wanted; what is not known to be wrong before this launch counts."""
    if every is None:
        return None
    known = resumed.manifest.state.get(CONFIRMED) if resumed.manifest is not None else None
    state.confirmed = known if isinstance(known, int) else resumed.step or 0
    return Confirmation(every, state, begun_at=resumed.step or 0, agreement=agreement, link=link, rank=rank, node=node)


class Confirmation:
    """Of one rank; used by its main thread alone.  What it confirms is part of the state."""

    def __init__(
        self,
        every: int,
        state: TrainingState,
        *,
        begun_at: int,
        agreement: Agreement,
        link: Link,
        rank: int,
        node: str,
    ) -> None:
        """Begin with a launch, after `begun_at` steps."""
        self._every, self._state, self._begun_at, self._node = every, state, begun_at, node
        self._modules = [part.module for part in state.modules.values()]
        self._agreement, self._link = agreement, link
        self._rank = rank
        self._first = True
        self._off = False  # the run is not deterministic
        self._called = False  # the script has the method at all
        self._steps = 0

    def check_if_due(self, compute: Callable[[], Any], step: int) -> bool:
        """Check after `step`, if this launch has done a step, and then at each K-th; whether it was due.

        Never at the first: it makes what later ones find, such as an optimizer's state and compiled code.

        Raises:
            CorruptionError, UsageError: as `_check`.
        """
        self._called = True
        if self._off or step <= self._begun_at or not (self._first or step % self._every == 0):
            return False
        self._check(compute, step)
        return True

    def note_step(self, step: int) -> None:
        """Note that a step is done, and say it once where the script never calls `confirm`."""
        self._steps += 1
        if self._steps == STEPS_UNCALLED and not self._called and self._rank == 0:
            warn(
                "confirm_not_called",
                step=step,
                why="confirm_every is set, and the loop does not call manager.confirm(): nothing is checked",
                remedy="loss = manager.confirm(lambda: forward_and_backward(first_micro_batch))",
            )

    def _check(self, compute: Callable[[], Any], step: int) -> None:
        """Compute several times and compare, on all ranks.

        Raises:
            CorruptionError: some ranks differ, and most are equal: on all ranks, in the same words.
            UsageError: the computation changes parameters.
        """
        first, self._first = self._first, False
        seen = self._look(compute, FIRST_TIMES if first else TIMES)
        if not self._any(seen.differs):
            self._state.confirmed = step
            return
        looks = [self._gather(seen)]
        if not first:
            looks.append(self._gather(self._look(compute, FIRST_TIMES)))
            guilty = find_guilty(looks)
            if guilty:
                self._raise(step, looks[0], guilty)
        self._off, self._state.confirmed = True, None
        if self._rank == 0:
            _say_unsteady(step, looks)

    def _any(self, differs: bool) -> bool:  # noqa: FBT001
        return bool(self._agreement.settle(Call.CONFIRM, [int(differs)])[0])

    def _gather(self, seen: _Seen) -> list[_Seen]:
        group = self._agreement.idle_group
        return [seen] if group is None else group.all_gather(seen)

    def _look(self, compute: Callable[[], Any], times: int) -> _Seen:
        found = compute_again(compute, self._modules, times)
        names = [name for name in found[0] if any(each.get(name) != found[0][name] for each in found[1:])]
        names += sorted({name for each in found[1:] for name in each} - set(found[0]))
        more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
        return _Seen(
            differs=bool(names),
            promised=torch.are_deterministic_algorithms_enabled(),
            what=", ".join(names[:NAMES_MAX]) + more,
            node=self._node,
            gpu=_gpu(),
        )

    def _raise(self, step: int, seen: list[_Seen], guilty: list[int]) -> None:
        confirmed = self._state.confirmed or 0
        if self._rank in guilty:
            own = seen[self._rank]
            self._link.send(
                Corrupted(rank=self._rank, step=step, confirmed=confirmed, what=shorten(own.what), gpu=own.gpu),
                keep=True,
            )
            self._link.flush(SAID_WITHIN_S)
        self._any(differs=True)  # nobody ends before that is said: the supervisor hears why before it hears an end
        who = "; ".join(
            f"rank {rank} on {seen[rank].node}{f' ({seen[rank].gpu})' if seen[rank].gpu else ''}: {seen[rank].what}"
            for rank in guilty[:NAMES_MAX]
        )
        more = f"; and {len(guilty) - NAMES_MAX} more ranks" if len(guilty) > NAMES_MAX else ""
        raise CorruptionError(
            f"silent corruption at step {step}: the same micro-batch came to other bits: {who}{more}.  "
            f"Resume from step {confirmed} or before, the last that was confirmed, and without that GPU"
        )


def find_guilty(looks: Sequence[Sequence[_Seen]]) -> list[int]:
    """Return the ranks that compute wrongly; none where the run is not deterministic after all, or may not be.

    That many computations were equal proves nothing: an operation may add in another order once in a thousand times.

    Args:
        looks: what each rank found, in the check itself and in the look after it.
    """
    if not all(each.promised for look in looks for each in look):
        return []
    world_size = len(looks[0])
    noisy = {rank for look in looks for rank, each in enumerate(look) if each.differs}
    guilty = [rank for rank, each in enumerate(looks[0]) if each.differs]
    if world_size == 1:  # with nobody to compare: wrong once among computations that are equal
        return [] if looks[-1][0].differs else guilty
    return [] if 2 * len(noisy) > world_size else guilty


def _say_unsteady(step: int, looks: Sequence[Sequence[_Seen]]) -> None:
    """Say once that the run is not deterministic, and which ranks show it: where it is one of many, look at its GPU."""
    differ = {rank: each.what for look in looks for rank, each in enumerate(look) if each.differs}
    few = 2 * len(differ) <= len(looks[0])
    warn(
        "not_deterministic",
        step=step,
        ranks=_numbers(sorted(differ)),
        what=differ[min(differ)],
        why="the same micro-batch comes to other bits, and silent corruption cannot be told from that: "
        "this launch does no further check",
        remedy=(
            f"{'check the GPUs of these ranks: most ranks are deterministic; ' if few else ''}"
            "torch.use_deterministic_algorithms(True), and fetch the micro-batch before confirm()"
        ),
    )


def compute_again(compute: Callable[[], Any], modules: Sequence[torch.nn.Module], times: int) -> list[Digests]:
    """Compute so many times from the same state; return the digests of each, and leave everything as it was.

    Raises:
        UsageError: the computation changes parameters.
    """
    parameters = _parameters(modules)
    versions = [each._version for _, each in parameters]  # noqa: SLF001  # torch's own counter of changes
    generators = random_state.as_tensors(random_state.capture())
    buffers = {id(each): each for module in modules for each in module.buffers()}.values()
    kept = [(each, each.detach().clone()) for each in buffers]
    gradients = _Gradients(modules)
    found = []
    try:
        for _ in range(times):
            gradients.clear()
            found.append(_compute(compute, modules, parameters))
            _put_back(kept)
            random_state.restore(generators)
    finally:
        gradients.restore()
        _put_back(kept)
        random_state.restore(generators)
    if versions != [each._version for _, each in parameters]:  # noqa: SLF001
        raise UsageError(
            "what confirm() is given changes parameters: give it the loss and the gradients of one micro-batch alone"
        )
    return found


def _compute(
    compute: Callable[[], Any], modules: Sequence[torch.nn.Module], parameters: Sequence[tuple[str, torch.Tensor]]
) -> Digests:
    """Return the sums of the loss and of each gradient as the backward pass hands it over."""
    sums: dict[str, list[torch.Tensor]] = {LOSS: []}

    def hook(name: str) -> Callable[[torch.Tensor], None]:
        return lambda gradient: sums.setdefault(name, []).extend(_sums(gradient))

    shown = [(name, each) for name, each in [*parameters, *_unsharded(modules)] if each.requires_grad]
    handles = [each.register_hook(hook(name)) for name, each in shown if each.is_leaf]  # type: ignore[no-untyped-call]
    try:
        with contextlib.ExitStack() as stack:
            for module in modules:
                for each in module.modules():
                    if isinstance(each, DistributedDataParallel):
                        stack.enter_context(each.no_sync())
            loss = compute()
        sums[LOSS] = [part for tensor in _tensors(loss) for part in _sums(tensor)]
    finally:
        for handle in handles:
            handle.remove()
    return {name: _digest(parts) for name, parts in sums.items()}


def _parameters(modules: Sequence[torch.nn.Module]) -> list[tuple[str, torch.Tensor]]:
    found = {id(each): (name, each) for module in modules for name, each in module.named_parameters()}
    return list(found.values())


def _put_back(kept: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for tensor, before in kept:
            tensor.copy_(before)


class _Gradients:
    """The gradients that parameters have, those that `fully_shard` keeps aside included."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        own = [each for _, each in _parameters(modules)]
        own += [each for _, each in _unsharded(modules)]
        self._places: list[tuple[Any, str]] = [(each, "grad") for each in own]
        for group in _groups(modules):  # `test_confirmation` pins these names
            self._places += [(each, "unsharded_accumulated_grad") for each in group.fsdp_params]
            self._places.append((group, "_partial_reduce_output"))
        self._before = [getattr(holder, name, None) for holder, name in self._places]

    def clear(self) -> None:
        """Take all of them away."""
        for holder, name in self._places:
            setattr(holder, name, None)

    def restore(self) -> None:
        """Put them back."""
        for (holder, name), before in zip(self._places, self._before, strict=True):
            setattr(holder, name, before)


def _groups(modules: Sequence[torch.nn.Module]) -> Iterator[Any]:
    """Yield the groups of parameters of `fully_shard`: what a rank computes is in them, before it is reduced."""
    for module in modules:
        for each in module.modules():
            if isinstance(each, FSDPModule):
                state = each._get_fsdp_state()  # noqa: SLF001
                several = getattr(state, "_fsdp_param_groups", None)  # older than torch 2.10: one, or none
                yield from (
                    group
                    for group in (several if several is not None else [getattr(state, "_fsdp_param_group", None)])
                    if group is not None
                )


def _unsharded(modules: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    for number, group in enumerate(_groups(modules)):
        for each in group.fsdp_params:
            tensor = getattr(each, "_unsharded_param", None)
            if tensor is not None:
                name = getattr(each, "_param_fqn", None) or f"parameter of group {number}"
                yield f"unsharded {name}", tensor


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of what a computation returned."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, float):
        yield torch.tensor(value, dtype=torch.float64)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _sums(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return integer sums over the bits of a tensor, where it lies: nobody waits for a GPU, and no copy is made."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if tensor.is_sparse:
        return [*_sums(tensor._indices()), *_sums(tensor._values())]  # noqa: SLF001  # as they are, not coalesced
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.contiguous().view(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    whole = bits.numel() - bits.numel() % COLUMNS
    rows = bits[:whole].view(-1, COLUMNS).sum(0, dtype=torch.int64)
    return [rows, bits[whole:].to(torch.int64)]


def _digest(parts: Sequence[torch.Tensor]) -> bytes:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(view_bytes(part.cpu()))
    return digest.digest()


def _gpu() -> str:
    """Name this rank's GPU; empty without one."""
    if not torch.cuda.is_available():
        return ""
    device = torch.cuda.current_device()
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return f"GPU-{uuid}" if uuid is not None else f"GPU {device}"


def _numbers(ranks: Sequence[int]) -> str:
    shown = ",".join(map(str, ranks[:16]))
    return f"{shown},..." if len(ranks) > 16 else shown  # noqa: PLR2004

"""Frames of a stack, of Python and of native code, and what they mean in words.  Pure."""

from __future__ import annotations

import itertools
import os
import re
from typing import NamedTuple

FRAMES_MAX = 200
LOADS = "is in the data loader"
NAME_MAX = 60  # characters of a native function

_FAULTHANDLER = re.compile(r'  File "(?P<path>[^"]+)", line (?P<line>\d+) in (?P<function>.+)')
_PY_SPY = re.compile(r"^ {4}(?P<function>\S.*) \((?P<path>[^()]+?)(?::(?P<line>\d+))?\)$", re.MULTILINE)
_COLLECTIVES = re.compile(
    r"(?:_?all_reduce|_?all_gather|_?all_to_all|_?reduce_scatter|_?broadcast|_?barrier|monitored_barrier|_?gather"
    r"|_?scatter|_?reduce|recv|send|wait|wait_for_unshard|_wait_for|synchronize)\w*"
)
_TORCH = re.compile(r"/torch/(?:distributed|autograd|cuda)/")
_GROUPS = re.compile(r"/stepkeeper_trainer/coordinate/groups\.py$")  # its collectives are called as torch's
_CONNECTING = ("_connect", "new_group")  # there: a rank waits until the others have come
_AGREEMENT = re.compile(r"/stepkeeper_trainer/coordinate/agreement\.py$")
_AGREEING = ("_started", "_missing", "idle_group")  # there: a rank waits for a thread that waits for the others
_LOADER = re.compile(r"/torch/utils/data/|/multiprocessing/(?:queues|connection)\.py$")
_LIBRARY = re.compile(r"(?:site|dist)-packages/|/lib(?:64)?/python\d|^<")
_OURS = re.compile(r"/stepkeeper_trainer/(?!examples/)")

_LIBC = re.compile(r"(?:^|/)(?:libc|libpthread|librt|libm|ld-[\w-]+|ld|linux-vdso|\[vdso\])[-.\d]*(?:\.so|$)")
_LIBC_SOURCE = re.compile(r"(?:^|/)(?:nptl|sysdeps|posix|io|misc|time|socket)/[\w./-]*\.[cSh]$")
_PLUMBING = re.compile(  # between Python and what it calls; some interpreters name the files that they were made from
    r"(?:^|/)(?:python[\d.]*|libpython[\w.]*|libffi[\w.-]*|_ctypes\.[\w.-]*"
    r"|(?:Modules|Objects|Parser|Python)/[\w./-]+\.[ch])$"
)
_NAMELESS = re.compile(r"(?:0x)?[0-9a-f]+|\?+|<unknown>|_start|start_thread|clone3?")
_DRESS = re.compile(r"^_*(?:GI_+)?(?:libc_)?|@.*$")  # of a function of libc: `__GI___libc_read`, `poll@@GLIBC_2.2.5`
_PLAIN_WAITS = re.compile(  # where threads always sleep: what called it says more
    r"futex\w*|\w*_?futex_\w+|(?:\w*_)?(?:cond|sem|lll_lock|mutex|rwlock|barrier)_\w+|p?poll|epoll_p?wait\d?|p?select"
    r"|(?:clock_)?nanosleep\w*|u?sleep|sched_yield|syscall\w*|raise|gsignal"
)


class Frame(NamedTuple):
    """One line of a stack."""

    path: str
    line: str
    function: str


class Doing(NamedTuple):
    """What a rank does, in words."""

    where: str
    waits: bool = False  # for other ranks
    halted: bool = False  # it can do nothing at all
    in_device: bool = False  # because it waits for a device or file system, and cannot be interrupted


class Below(NamedTuple):
    """What native code a rank is in, below Python; empty where nothing is known."""

    call: str = ""  # of libc, where it says something: `pause`, `read`
    function: str = ""  # of another library, with its name: `cuStreamSynchronize (libcuda.so.1)`


def describe(frames: tuple[Frame, ...]) -> Doing:
    """Say what a stack means.

    >>> describe((Frame("/p/site-packages/torch/distributed/distributed_c10d.py", "3", "all_reduce"),)).where
    'waits in all_reduce'
    """
    own = next((f for f in frames if not _LIBRARY.search(f.path) and not _OURS.search(f.path)), None)
    place = f" ({os.path.basename(own.path)}:{own.line} in {own.function})" if own is not None else ""
    for frame in frames:
        if _LOADER.search(frame.path):
            return Doing(f"{LOADS}{place}")
        if _GROUPS.search(frame.path) and (frame.function in _CONNECTING or _COLLECTIVES.fullmatch(frame.function)):
            return Doing(f"waits in {frame.function}{place}", waits=True)
        if _OURS.search(frame.path) and any(map(_waits_for_a_message, frames)):
            return Doing(f"waits in the agreement of all ranks{place}", waits=True)
        if _OURS.search(frame.path):
            return Doing(f"is in stepkeeper_trainer's {frame.function}{place}", waits=_is_agreeing(frames))
        if _TORCH.search(frame.path) and _COLLECTIVES.fullmatch(frame.function):
            return Doing(f"waits in {frame.function}{place}", waits=True)
        if _TORCH.search(frame.path) and "backward" in frame.function:
            return Doing(f"is in {frame.function}{place}", waits=True)
        if frame is own:
            break
    if own is not None:
        return Doing(f"is in {own.function} ({os.path.basename(own.path)}:{own.line})")
    inner = frames[0]
    return Doing(f"is in {inner.function} ({inner.path}:{inner.line})")


def _waits_for_a_message(frame: Frame) -> bool:
    return frame.function in _AGREEING and bool(_AGREEMENT.search(frame.path))


def _is_agreeing(frames: tuple[Frame, ...]) -> bool:
    return any(_TORCH.search(frame.path) for frame in frames)


def says_it_all(where: str) -> bool:
    """Tell whether native frames would add nothing: the rank waits in a collective that is named.

    >>> says_it_all("waits in all_reduce"), says_it_all("is in the data loader")
    (True, False)
    """
    return where.startswith("waits in ")


def in_own_code(frames: tuple[Frame, ...]) -> bool:
    """Tell whether the innermost frame is the user's: no library, which may wait for something, has been called.

    >>> own, library = Frame("/w/train.py", "9", "load"), Frame("/p/lib/python3.11/queue.py", "1", "get")
    >>> in_own_code((own,)), in_own_code((library, own))
    (True, False)
    """
    return bool(frames) and not _LIBRARY.search(frames[0].path) and not _OURS.search(frames[0].path)


def below(frames: tuple[Frame, ...], python: tuple[Frame, ...]) -> Below:
    """Return the native code above the innermost Python frame.

    Args:
        frames: Python's and native ones, the innermost first.
        python: Python's alone, of the same process.

    >>> own = Frame("/w/train.py", "9", "load")
    >>> below((Frame("libc.so.6", "?", "__pread64"), Frame("liblmdb.so.0", "?", "mdb_get"), own), (own,))
    Below(call='pread64', function='mdb_get (liblmdb.so.0)')
    """
    known = {(each.function, os.path.basename(each.path)) for each in python}
    native = list(itertools.takewhile(lambda each: not _is_python(each, known), frames))
    call = next((_undressed(each.function) for each in native if _is_libc(each) and _is_named(each)), "")
    outer = next((each for each in native if not _is_libc(each) and not _PLUMBING.search(each.path)), None)
    return Below(
        call="" if _PLAIN_WAITS.fullmatch(call) and outer is not None else call,
        function="" if outer is None else _named(outer),
    )


def _is_python(frame: Frame, known: set[tuple[str, str]]) -> bool:
    path = frame.path
    return path.endswith((".py", ".pyc")) or path[:1] == "<" or (frame.function, os.path.basename(path)) in known


def _is_libc(frame: Frame) -> bool:
    return bool(_LIBC.search(frame.path) or _LIBC_SOURCE.search(frame.path))


def _is_named(frame: Frame) -> bool:
    return not _NAMELESS.fullmatch(frame.function)


def _undressed(function: str) -> str:
    return _DRESS.sub("", function)[:NAME_MAX]


def _named(frame: Frame) -> str:
    library = os.path.basename(frame.path)
    return f"{_bare(frame.function)} ({library})" if _is_named(frame) else library


def _bare(function: str) -> str:
    """Return a C++ function without its arguments and those of its templates.

    >>> _bare("gloo::Context<float, (int)2>::wait(std::vector<int> const&, int) const")
    'gloo::Context::wait'
    """
    before = ""
    bare = function.replace("(anonymous namespace)", "anonymous")
    while bare != before:
        before, bare = bare, re.sub(r"<[^<>()]*>|\([^()]*\)(?: const)?", "", bare)
    return bare.partition(" [clone")[0].strip()[:NAME_MAX] or function[:NAME_MAX]


def of_faulthandler(text: str) -> tuple[Frame, ...]:
    """Return the main thread's frames of what faulthandler wrote: it is the last one, or the one that was current."""
    blocks = re.split(r"\n(?=(?:Current thread|Thread) 0x)", "\n" + text)
    chosen = next((block for block in blocks if block.startswith("Current thread")), blocks[-1])
    return tuple(Frame(m["path"], m["line"], m["function"]) for m in _FAULTHANDLER.finditer(chosen))[:FRAMES_MAX]


def of_py_spy(text: str, pid: int = 0) -> tuple[Frame, ...]:
    """Return the main thread's frames of `py-spy dump`; where it knows no names, it is the one with the pid."""
    blocks = re.split(r"\n(?=Thread )", "\n" + text)[1:]
    heads = [block.partition("\n")[0] for block in blocks]
    chosen = next((at for at, head in enumerate(heads) if "MainThread" in head), None)
    if chosen is None:
        chosen = next((at for at, head in enumerate(heads) if head.startswith(f"Thread {pid} ")), None)
    if chosen is None:
        return ()
    found = _PY_SPY.finditer(blocks[chosen])
    return tuple(Frame(m["path"], m["line"] or "?", _as_faulthandler(m)) for m in found)[:FRAMES_MAX]


def _as_faulthandler(found: re.Match[str]) -> str:
    """Return a function's name without its class, which py-spy shows: the two are compared where one of them fails."""
    name = found["function"]
    return name.rpartition(".")[2] if found["path"].endswith(".py") or found["path"][0] == "<" else name

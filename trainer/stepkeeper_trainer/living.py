"""Which objects of some types there are: the garbage collector knows who lives.

`gc.get_objects()` is no way to find them.  Its list has tuples that other threads are just making, and CPython refuses
to end a tuple that somebody else holds: a `SystemError` in that thread, as in a save.  An object refers to its type.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


def living(*kinds: type[Any]) -> list[Any]:
    """Return the objects of these types, and of those derived from them; none is asked for anything.

    >>> kind = type("Kind", (), {})
    >>> one = kind()
    >>> living(kind) == [one]
    True
    """
    wanted = {each for kind in kinds for each in _with_derived(kind)}
    return [each for each in gc.get_referrers(*wanted) if type(each) in wanted]


def _with_derived(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for each in type.__subclasses__(kind):
        yield from _with_derived(each)

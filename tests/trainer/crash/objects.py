"""What the campaign does to an object store by itself, and what it finds there."""

from __future__ import annotations

import re
import urllib.request
from html import unescape
from typing import Any
from urllib.parse import quote

import obstore

from stepkeeper_trainer.formats.manifest import MANIFEST_NAME
from stepkeeper_trainer.tiers.objects import ObjectTier

_LATE_S = 90.0


def url_of(prefix: str) -> str:
    """Return the address of a tier."""
    return f"s3://bucket/{prefix}"


def copy(endpoint: str, source: str, target: str) -> None:
    """Have the store copy all objects below one prefix to another; in a process that forks, so without obstore."""
    listed = _ask(f"{endpoint}/bucket?list-type=2&prefix={quote(source)}/").decode()
    keys = [unescape(key) for key in re.findall("<Key>([^<]*)</Key>", listed)]
    assert keys, f"nothing is below {source}"
    for key in keys:
        place = f"{endpoint}/bucket/{target}/{quote(key.removeprefix(f'{source}/'))}"
        _ask(place, "PUT", {"x-amz-copy-source": f"/bucket/{quote(key)}"})


def look(prefix: str) -> dict[str, Any]:
    """Return what is wrong with each step that the store says it has, and which objects belong to none.

    Only in a process that ends afterwards: obstore's threads do not survive a fork.
    """
    tier = ObjectTier(url_of(prefix))
    steps = tier.steps()
    keys = [str(found["path"]) for batch in obstore.list(tier.store) for found in batch]
    whole = {held.directory for held in steps}
    return {
        "store": {str(held.manifest.step): tier.problems(held, deep=True) for held in steps},
        "orphans": [key for key in keys if key.split("/")[0] not in whole],
        "manifests": [key for key in keys if key.endswith(MANIFEST_NAME)],
    }


def _ask(address: str, method: str = "GET", headers: dict[str, str] | None = None) -> bytes:
    request = urllib.request.Request(address, method=method, headers=headers or {})  # noqa: S310  # our own
    with urllib.request.urlopen(request, timeout=_LATE_S) as answer:  # noqa: S310
        return bytes(answer.read())

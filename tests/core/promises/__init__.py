"""What must hold for every history, however unlikely: the promises that cost a run when they are broken."""

from __future__ import annotations

from tests.core.promises import budgets, deadlines, launches, nodes, requeues
from tests.core.promises.register import GROWING, POLICY, assert_kept

__all__ = ["GROWING", "POLICY", "assert_kept", "budgets", "deadlines", "launches", "nodes", "requeues"]

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    *[f"tests.core.promises.{name}" for name in ("budgets", "deadlines", "launches", "nodes", "requeues")]
)

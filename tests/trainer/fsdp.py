"""Whether this torch can train with `fully_shard` on CPUs: torch 2.6 cannot."""

from __future__ import annotations

import pytest
import torch

needs_fsdp = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="fully_shard of this torch does not train on CPUs"
)

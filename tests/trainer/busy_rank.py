"""The reference script with a rank that works longer: `python -m tests.trainer.busy_rank RANK SECONDS ARGS…`."""

from __future__ import annotations

import os
import runpy
import sys
import time

from stepkeeper_trainer.examples.transformer import Transformer

_forward = Transformer.forward


def install(seconds: float) -> None:
    """Have each forward compute for so long besides."""

    def busy(self, *arguments):  # type: ignore[no-untyped-def]
        end_at = time.thread_time() + seconds
        while time.thread_time() < end_at:
            pass
        return _forward(self, *arguments)

    Transformer.forward = busy  # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv[1] == os.environ.get("RANK", "0"):
        install(float(sys.argv[2]))
    sys.argv = [sys.argv[0], *sys.argv[3:]]
    runpy.run_module("stepkeeper_trainer.examples.train_lm", run_name="__main__")

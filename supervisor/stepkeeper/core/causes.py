"""Why a launch ended, in one word, and what a verdict on it tells the rules.  Pure."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Cause(StrEnum):
    """Why a launch ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    NODE_FAULT = "node_fault"
    NODE_LOST = "node_lost"
    NETWORK = "network"
    GPU_MEMORY = "gpu_memory"
    HOST_MEMORY = "host_memory"
    EXCEPTION = "exception"
    NUMERICAL = "numerical"
    COLLECTIVE_TIMEOUT = "collective_timeout"
    HANG = "hang"
    STORAGE = "storage"
    CHECKPOINT = "checkpoint"
    CONFIGURATION = "configuration"
    VERSION_MISMATCH = "version_mismatch"
    SEGFAULT = "segfault"
    UNKNOWN = "unknown"


class Notice(StrEnum):
    """Why Slurm told us."""

    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    REQUEUED = "requeued"
    CANCELLED = "cancelled"
    ASKED_TO_SAVE = "asked_to_save"
    NOT_FOR_US = "not_for_us"
    UNKNOWN = "unknown"  # Slurm could not be asked


class SkippedData(msgspec.Struct, frozen=True, kw_only=True):
    """Data that the training does not take again: that of `steps` steps from `step` on."""

    step: int
    steps: int


class Tried(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How often a launch failed in the same way since a verified step last lay beyond the place."""

    cause: Cause
    place: str  # an exception and its line, a node, or the rule
    count: int = 1  # the place in the cause's row; 0 again after a launch that may have progressed unseen
    step: int | None = None  # at which it failed last
    repeats: int = 0  # in all, whatever launches may have done unseen; 0: of a version that did not count
    stepped_back: bool = False  # one checkpoint, because it failed at the same step twice

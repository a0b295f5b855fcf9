"""Checkpoints of other frameworks: listed, verified and chosen without the framework and without torch, read-only.

    DIR -> recognition -> an adapter (adapters/) lists steps -> tree (files, links refused) -> contents (complete?)
        -> deep verification (archives, DCP, safetensors) -> first sight (digests of before) -> the newest verified step

    DIR -> repair: pointer files that name another one than that, and torn ones put aside; on request only

    CMD -> its script (script) -> framework, directory, resume argument (following): how a run uses them; a process of
        its own answers the supervisor (asking)

A new framework is one file in `adapters/` and one test in tests/frameworks/test_layouts.py.
"""

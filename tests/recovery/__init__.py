"""Failures under several ways to keep a training alive, side by side: the parts of `tests.bench_recovery`."""

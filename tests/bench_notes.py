"""The words of `docs/benchmarks-checkpoint.md`: `tests.bench_checkpoint` writes the figures between them."""

HEAD = """Written by `make bench-checkpoint`, and by nothing else: {cores} cores, {memory} GiB of memory, file system
{kind}, torch {torch}, {isal}, {mib} MiB of state, load average {load} before it began. Machines are noisy and shared:
quote the ratios. Each is taken within one process, of what it measured one after the other."""

SAVE_HEAD = """{mib} MiB: a model and its AdamW, the same on all ranks, so that each writes its share. Training goes on
beside: steps that work on all of the state with every core. Medians of {saves} saves after the first.

*Blocked*: the call that saves, as a multiple of one warm memory copy of the same tensors. *Slowed*: what steps took
longer than their median from the request until the step was durable, by the same measure. *Durable*: the time of
`dd` with fsync for as many bytes, alone on the machine, as a share of the time from request to durable. *Memory*: the
peak above training's own, as a multiple of the state, child processes included. torchsnapshot never syncs its files:
its *durable* is the end of its writes. `torch.save` is followed by an fsync."""

TARGETS_HEAD = """What the figures above come to, against what this was built for."""

NOTES = """"""

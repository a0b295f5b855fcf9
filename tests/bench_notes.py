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

NOTES = """## What it costs, and why

- **Writes go past the page cache** (`O_DIRECT`, where the file system has it, from 4 MiB a file). A copy into it costs
  the cores 0.08 to 0.9 s for 256 MiB, by whether the kernel has free pages at hand; a direct write 0.02 s. That was
  most of what a save took from training. A save in an emergency is written through the page cache: nothing trains then,
  and it is read back at once.
- **CRC-32 is most of the rest.** A zip archive, which is what torch reads, has one of each tensor: 60 to 70 ms for
  256 MiB by zlib, 9 ms by ISA-L (`pip install isal`; it is taken where it is installed). Both digests together: 15 ms.
- **Blocked, many tensors.** The state is collected (3 ms for 20,000), each tensor is looked at (names, shapes, types:
  7 ms, and beside the copying) and copied (as the limit, on the threads that torch has). With one thread a rank there
  is nothing to do the look beside: then about 1.4x is what to expect.
- **First save, many tensors.** `.metadata` is pickled once for a layout: 0.4 s for 20,000, in the save's thread.
  It holds the interpreter for parts of it. It is not blocked time, and the same bytes serve all later saves.
- **No process of its own for writing.** What the save's threads compute for 256 MiB in 20,000 tensors fell from 0.8 s
  to 0.12 s, and *slowed* to far below a tenth of stock's, in threads. What is left of it under the interpreter's lock
  is the CRC of small tensors: it holds the lock, 5 KiB at a time. To let it go and take it again for each tensor, as
  zlib does by itself, made such a save 1.2 times as long beside a loop that never leaves the interpreter.
- **Memory**: the arena is one copy of the state. Beyond it there are about 1 KiB a tensor for plans, and 40 MiB of
  modules and threads, which weigh more the smaller the state that is measured."""

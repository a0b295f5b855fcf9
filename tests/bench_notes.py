"""The words of `docs/benchmarks-checkpoint.md`: `tests.bench_checkpoint` writes the figures between them."""

HEAD = """Written by `make bench-checkpoint`, and by nothing else: {cores} cores, {memory} GiB of memory, file system
{kind}, torch {torch}, {isal}, {mib} MiB of state, load average {load} before it began. Machines are noisy and shared:
quote the ratios. Each is taken within one process, of what it measured one after the other."""

SAVE_HEAD = """{mib} MiB: a model and its AdamW, the same on all ranks, so that each writes its share. Training goes on
beside: steps that work on all of the state with every core. Medians of {saves} saves after the first.

*Blocked*: the call that saves, as a multiple of one warm memory copy of the same tensors. *Slowed*: what steps took
longer than their median from the request until the step was durable, by the same measure. *Durable*: the time of
`dd` with fsync for as many bytes, alone on the machine, as a share of the time from request to durable. *Memory*: the
peak above training's own, as a multiple of the state, child processes included. `torch.save` is followed by an fsync,
and so are torchsnapshot and torch_checkpointing, in a thread beside training: they never sync a file themselves."""

TARGETS_HEAD = """What the figures above come to, against what this was built for."""

NOTES = """## What it costs, and why

- **Writes go past the page cache** (`O_DIRECT`, where the file system has it, from 4 MiB a file). A copy into it
  costs the cores 0.08 to 0.9 s for 256 MiB, by whether the kernel has free pages at hand; a direct write 0.02 s. That
  was most of what a save took from training. A save in an emergency is written through the page cache: nothing trains
  then, and it is read back at once.
- **CRC-32 is most of the rest.** A zip archive, which is what torch reads, has one of each tensor: 60 to 70 ms for
  256 MiB by zlib, 9 ms by ISA-L (`pip install isal`; it is taken where it is installed). Both digests together: 15
  ms.
- **Blocked, many tensors.** The state is collected (3 ms for 20,000), each tensor is looked at (names, shapes, types:
  7 ms, and beside the copying) and copied (as the limit, on the threads that torch has). With one thread a rank there
  is nothing to do the look beside: then about 1.4x is what to expect.
- **First save, many tensors.** What depends on the layout alone is made once, beside the first steps where there is
  training. For 20,000 tensors, in seconds of one core: torch's planner 0.4, the arena's layout 0.3, what goes into
  which file 0.1, `.metadata` 0.5 (half of it in pickle): 65 us a tensor together, whatever its size, against 0.02 s
  for writing 256 MiB. A first save that nothing has prepared waits for all of it, and the less time the bytes take,
  the more that weighs: that is the row on a first save above. Two thirds of it make torch's own records, one by one
  under the interpreter's lock. The same bytes serve all later saves, whose thread computes 0.04 s.
- **No process of its own for writing.** What the save's threads compute for 256 MiB in 20,000 tensors fell from 0.8 s
  to 0.12 s, and *slowed* to far below a tenth of stock's, in threads. What is left of it under the interpreter's lock
  is the CRC of small tensors: it holds the lock, 5 KiB at a time. To let it go and take it again for each tensor, as
  zlib does by itself, made such a save 1.2 times as long beside a loop that never leaves the interpreter.
- **Memory**: the arena is one copy of what a rank writes. Beyond it there are about 1 KiB a tensor for plans, and 40
  MiB of modules and threads, which weigh more the smaller the state that is measured. (Earlier figures of up to 1.6
  with few large tensors were the benchmark's own: the allocator kept the memory of the copies that it compares with.)
- **Records that Python searches for cycles.** Each object that is kept makes that search longer, in training too. For
  20,000 tensors we kept 320,000 beside the script's 330,000 (a search took 270 ms instead of 177); torch's records of
  the plan are given up now once `.metadata` is made, and shapes are kept once: 100,000, and 190 ms.
- **Few large tensors.** Ours, stock's stager and torch_checkpointing's all copy at the speed of memory: which of them
  blocks less, by a tenth of its own limit, changes from run to run. Until it is durable stock takes about five times
  as long and slows training seven times as much; torch_checkpointing, which writes in a process of its own, 3.6 times
  as long, and slows it 2.5 times as much.
- **20,000 tensors in a process of its own** (stock's process mode, torch_checkpointing) fail: each tensor is a file of
  shared memory there, and both sides keep all of them open.
- **Several ranks.** Each stages what it writes; of what others hold too, small tensors are staged besides, and larger
  ones (64 KiB) are hashed where they are, which reads once where a copy reads and writes. The limit is a copy of the
  whole state, on all ranks at once, so few large tensors fall below it where the machine is quiet (0.73x and 1.45x
  were measured for two ranks); many small ones are staged by every rank. With 20,000 tensors and one core a rank there
  is no core for the look beside the copying, and a tensor that is hashed where it is costs calls besides: memory falls
  to a half (2 ranks) and a quarter (4 ranks) of the state where its tensors have more than 64 KiB, and blocking rises.
- **Blocked, 20,000 tensors on several ranks, in time of the core.** With two ranks and 1 GiB a warm copy of all takes a
  rank 0.08 s, a save 0.18 to 0.20: copying what it writes and the small ones 0.065, hashing 7,500 tensors where they
  are 0.08 to 0.10 (0.03 of it the hash, the rest a dozen calls a tensor), looking at names, shapes and types 0.01,
  collecting 0.005. It computes all that time; no rank waits for another.
- **A first save of 4 GiB** blocked 2.75 times its warm copy, later ones 0.89. It computes all that time: on a busy
  machine both cores together 0.55 s, later 0.3 to 0.5, while no page is faulted in, reclaimed or moved (counted). It
  does not look like this library's: a plain copy of 3 GiB that had lain for a while took the core 0.37 s, then 0.20.
  A copy into memory just made is as fast the first time as the third, also after 6 GiB more were taken and given
  back, and of huge pages it is no faster. One thing gave the same picture: with the marks cleared by which the kernel
  sees that a page was used, the next copy took three times the core's time, again without a fault that is counted.
  The machine is virtual: such work is its host's. What makes it necessary before a first save is not known. (The
  benchmark used to wait a second for this memory, and fresh pages cost such a machine up to 2.7 s of a core a GiB: it
  now waits until all is there.)
- **Durable, several ranks on two cores.** A save's threads want the cores that the steps keep busy, and wait for
  their turn; with training paused the same saves were durable 1.7 to 1.9 times as fast as `dd`. What they compute is
  not it: with two ranks and 100 tensors 0.1 s a rank for CRC, hashes and writes together. Beside other work they
  spent most of 2.1 s waiting for a core, or, in another save, for the disk to take what was written. Rank 0 looked
  for the others' reports in pauses that grew to 0.5 s, and was 0.2 to 0.4 s late where it had waited for one and a
  half; since then a pause is no longer than a tenth of what it has waited. And it is told at the end of a step, as in
  a training. Compare within a table only: `dd` of as many bytes took 3.1 s on one rank, and 0.6 s by two and four at
  once.
- **Loading, warm.** Bytes of the page cache are read, hashed and copied, in chunks of 16 MiB: about as fast as
  stock's read without a check. More threads than cores made it slower, for they took each other's caches.
- **Deep verification, many tensors.** A step of 20,000 tensors has 4 MB of `.metadata`, which is read as data, by one
  core: 17 us a tensor (passing over opcodes 2.5, unpickling into inert records 3.5, what they say 5.5, whether all is
  covered 2, giving the memory back 3.5). For 5,000 tensors in 128 MiB that is 0.08 s beside 0.03 s of hashing.
  Reading does not go on beside it: both want the interpreter's lock. Where a cache knows the step it is not parsed
  again.
- **Deep verification, cold**, reads past the page cache, 4 MiB at a time, into huge pages: of 4 KiB pages each is an
  entry of its own in a request to the disk, and the same disk gave a third (1.1 instead of 3.0 GiB/s). `cat` gets
  what the kernel reads ahead. Its threads compute 0.2 s for each GiB. Each round takes both twice, in turn.
"""

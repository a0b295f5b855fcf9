"""The words of `docs/benchmarks-checkpoint.md`: `tests.bench_checkpoint` writes the figures between them."""

HEAD = """\
Written by `make bench-checkpoint`, and by nothing else. {cores} cores, {memory} GiB of memory, file system {kind},
torch {torch}, {isal}, {mib} MiB of state. The load average was {load} before it began. Machines are noisy and
shared: quote the ratios. Each is taken within one process, of what it measured one after the other."""

SAVE_HEAD = """\
{mib} MiB: a model and its AdamW, the same on all ranks, so that each writes its share. Training continues beside it:
steps that work on all of the state with every core. Medians of {saves} saves after the first.

*Blocked*: the call that saves, as a multiple of one warm memory copy of the same tensors. *Slowed*: what steps took
longer than their median from the request until the step was durable, by the same measure. *Durable*: the time of
`dd` with fsync, as a share of the time from request to durable. `dd` writes as many bytes, alone on the machine.
*Memory*: the peak above training's own, as a multiple of the state, child processes included. `torch.save` is
followed by an fsync. So are torchsnapshot and torch_checkpointing, in a thread beside training: they never sync a
file themselves."""

TARGETS_HEAD = """What the figures above come to, against what this was built for."""

NOTES = """## What it costs, and why

- **Writes go past the page cache** (`O_DIRECT`, where the file system has it, from 4 MiB a file). A copy into the
  cache costs the cores 0.08 to 0.9 s for 256 MiB. It depends on whether the kernel has free pages at hand. A direct
  write costs 0.02 s. That was most of what a save took from training. An emergency save is written through the page
  cache: nothing trains then, and it is read back at once.
- **CRC-32 is most of the rest.** A zip archive, which is what torch reads, has one of each tensor. For 256 MiB it
  takes 60 to 70 ms by zlib, and 9 ms by ISA-L. ISA-L (`pip install isal`) is taken where it is installed. Both
  digests together take 15 ms.
- **Blocked, many tensors.** Collecting the state takes 3 ms for 20,000 tensors. Looking at names, shapes and types
  takes 7 ms, beside the copying. The copying is as fast as the limit, on the threads that torch has. With one thread
  a rank nothing else can do the look: then about 1.4x is what to expect.
- **First save, many tensors.** What depends on the layout alone is made once, beside the first steps where there is
  training. For 20,000 tensors that takes 1.3 s of one core. torch's planner takes 0.4 s, the arena's layout 0.3 s,
  the contents of files 0.1 s, `.metadata` 0.5 s. Half of the last is pickle. Together it is 65 us a tensor, whatever
  its size, against 0.02 s for writing 256 MiB. A first save that nothing has prepared waits for all of it. The less
  time the bytes take, the more that weighs: see the row on a first save above. Two thirds of it make torch's own
  records, one by one under the interpreter's lock. The same bytes serve all later saves, whose thread computes 0.04
  s.
- **No process of its own for writing.** For 256 MiB in 20,000 tensors, the work of the save's threads fell from 0.8
  s to 0.12 s. *Slowed* fell to far below a tenth of stock's, in threads. What is left under the interpreter's lock
  is the CRC of small tensors: 5 KiB at a time. zlib lets the lock go and takes it again for each tensor. That made
  such a save 1.2 times as long beside a loop that never leaves the interpreter.
- **Memory**: the arena is one copy of what a rank writes. Beyond it there are about 1 KiB a tensor for plans, and 40
  MiB of modules and threads. These weigh more the smaller the state that is measured. Earlier figures of up to 1.6
  with few large tensors were the benchmark's own. The allocator kept the memory of the copies that it compares with.
- **Records that Python searches for cycles.** Each object that is kept makes that search longer, in training too.
  For 20,000 tensors we kept 320,000 objects beside the script's 330,000. A search took 270 ms instead of 177. Now
  torch's records of the plan are given up once `.metadata` is made, and shapes are kept once. That leaves 100,000
  objects, and 190 ms.
- **Few large tensors.** Ours, stock's stager and torch_checkpointing's all copy at the speed of memory. Which of
  them blocks less, by a tenth of its own limit, changes from run to run. Until it is durable, stock takes about five
  times as long, and slows training seven times as much. torch_checkpointing writes in a process of its own. It takes
  3.6 times as long, and slows training 2.5 times as much.
- **20,000 tensors in a process of its own** (stock's process mode, torch_checkpointing) fail. Each tensor is a file
  of shared memory there, and both sides keep all of them open.
- **Several ranks.** Each stages what it writes. Of what others hold too, small tensors are staged besides. Larger
  ones (64 KiB) are hashed where they are, which reads once where a copy reads and writes. The limit is a copy of the
  whole state, on all ranks at once. On a quiet machine few large tensors fall below it: two ranks had 0.73x and
  1.45x. Many small ones are staged by every rank. With 20,000 tensors and one core a rank, no core is left for the
  look beside the copying. A tensor that is hashed where it is costs calls besides. So memory falls where tensors
  have more than 64 KiB, and blocking rises. With 2 ranks memory is a half of the state there, with 4 ranks a
  quarter.
- **Blocked, 20,000 tensors on several ranks, in time of the core.** With two ranks and 1 GiB a warm copy of all
  takes a rank 0.08 s. A save takes 0.18 to 0.20 s. Copying what it writes and the small ones takes 0.065 s. Hashing
  7,500 tensors where they are takes 0.08 to 0.10 s. Of that 0.03 s is the hash, and the rest a dozen calls a tensor.
  Looking at names, shapes and types takes 0.01 s, collecting 0.005 s. It computes all that time; no rank waits for
  another.
- **A first save of 4 GiB** blocked 2.75 times its warm copy, later ones 0.89. It computes all that time. On a busy
  machine both cores together took 0.55 s, later 0.3 to 0.5 s. No page is faulted in, reclaimed or moved meanwhile
  (counted). It does not look like this library's work. A plain copy of 3 GiB that had lain for a while took the core
  0.37 s, then 0.20 s. A copy into memory just made is as fast the first time as the third. That holds also after 6
  GiB more were taken and given back, and huge pages make it no faster. One thing gave the same picture: to clear the
  marks by which the kernel sees that a page was used. The next copy then took three times the core's time, again
  without a fault that is counted. The machine is virtual: such work is its host's. What makes it necessary before a
  first save is not known. The benchmark used to wait a second for this memory. Fresh pages cost such a machine up to
  2.7 s of a core a GiB. Now the benchmark waits until all is there.
- **Durable, several ranks on two cores.** A save's threads want the cores that the steps keep busy, and wait for
  their turn. With training paused the same saves were durable 1.7 to 1.9 times as fast as `dd`. What they compute is
  not the cause. With two ranks and 100 tensors, CRC, hashes and writes together take 0.1 s a rank. Beside other work
  they spent most of 2.1 s waiting for a core. In another save they waited for the disk to take what was written.
  Rank 0 looked for the others' reports in pauses that grew to 0.5 s. It was 0.2 to 0.4 s late where it had waited
  for one and a half seconds. Since then a pause is no longer than a tenth of what it has waited. Rank 0 also hears
  of the commit at the end of a step, as in a training. Compare within a table only: `dd` took 3.1 s on one rank. For
  as many bytes by two and by four ranks at once it took 0.6 s.
- **Loading, warm.** Bytes of the page cache are read, hashed and copied, in chunks of 16 MiB. That is about as fast
  as stock's read without a check. More threads than cores made it slower, for they took each other's caches.
- **Deep verification, many tensors.** A step of 20,000 tensors has 4 MB of `.metadata`. One core reads it as data,
  at 17 us a tensor. Passing over opcodes takes 2.5 us, unpickling into inert records 3.5, what they say 5.5. Whether
  all is covered takes 2 us, giving the memory back 3.5. For 5,000 tensors in 128 MiB that is 0.08 s, beside 0.03 s
  of hashing. No file is read meanwhile: both want the interpreter's lock. Where a cache knows the step, it is not
  parsed again.
- **Deep verification, cold**, reads past the page cache, 4 MiB at a time, into huge pages. Of 4 KiB pages each is an
  entry of its own in a request to the disk. With those the same disk gave a third: 1.1 instead of 3.0 GiB/s. `cat`
  gets what the kernel reads ahead. The threads of the verification compute 0.2 s for each GiB. Each round takes both
  twice, in turn.
"""

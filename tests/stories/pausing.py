"""The reference training with a pause that real programs make: `python pausing.py PAUSE STEP [options of it]`.

Rank 1 does something else while rank 0 waits for it.  Copied to where the job's user can read it; imports nothing of
the tests.
"""

import gc
import hashlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import torch

from stepkeeper_trainer.examples import train_lm

RANK = 1


def sleep() -> None:
    """A service is asked again after a while: sooner than anybody would stop waiting."""
    time.sleep(20)


def nap() -> None:
    """A back-off in small sleeps: the first look meets it, and it is over before the second."""
    for _ in range(7):
        time.sleep(1)


def stop() -> None:
    """Another process stops this one, and lets it go on."""
    pid = os.getpid()
    program = f"import os, time; time.sleep(2); os.kill({pid}, {int(signal.SIGCONT)})"
    continues = subprocess.Popen([sys.executable, "-c", program])
    os.kill(pid, signal.SIGSTOP)
    continues.wait()


def lock() -> None:
    """A thread loads data, and the main thread waits for it."""
    loaded = threading.Event()
    threading.Timer(18.0, loaded.set).start()
    loaded.wait()


def poll() -> None:
    """A file is waited for, which another process writes."""
    file = f"/tmp/{os.getpid()}.ready"
    program = f"import pathlib, time; time.sleep(18); pathlib.Path({file!r}).touch()"
    with subprocess.Popen([sys.executable, "-c", program]):
        while not os.path.exists(file):
            time.sleep(1)
    os.unlink(file)


def seldom() -> None:
    """A file is waited for, and looked for at each other sleep only."""
    file = f"/tmp/{os.getpid()}.ready"
    program = f"import pathlib, time; time.sleep(18); pathlib.Path({file!r}).touch()"
    with subprocess.Popen([sys.executable, "-c", program]):
        while not os.path.exists(file):
            for _ in range(2):
                time.sleep(1)
    os.unlink(file)


def fetch() -> None:
    """A service is asked until it answers."""
    until = time.monotonic() + 18
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", 9), timeout=1).close()
        except OSError:
            time.sleep(1)


def answer() -> None:
    """A thread asks a service, which takes its time, and the main thread looks at the thread now and then."""
    here, there = socket.socketpair()
    here.settimeout(60)
    asks = threading.Thread(target=here.recv, args=(1,))
    asks.start()
    threading.Timer(18.0, there.send, (b"1",)).start()
    while asks.is_alive():
        time.sleep(1)


def child() -> None:
    """A process of one's own is waited for, which waits itself."""
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(18)"])
    while started.poll() is None:
        time.sleep(1)


def load() -> None:
    """The storage of the data loader's workers does not answer for a while."""
    loader = torch.utils.data.DataLoader(_Slow(), num_workers=1)
    next(iter(loader))


class _Slow(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        time.sleep(18)
        return index


def evaluate() -> None:
    """A validation of one rank."""
    until = time.monotonic() + 18
    while time.monotonic() < until:
        hashlib.sha256(bytes(100_000)).digest()


def collect() -> None:
    """Python looks for cycles among many objects."""
    kept = [[number] for number in range(1_000_000)]
    until = time.monotonic() + 18
    while time.monotonic() < until:
        gc.collect()
    del kept


def write() -> None:
    """A checkpoint of somebody else's."""
    until = time.monotonic() + 18
    with tempfile.TemporaryFile() as file:
        while time.monotonic() < until:
            file.seek(0)
            file.write(bytes(1_000_000))
            os.fsync(file.fileno())
            time.sleep(0.01)


def compile_() -> None:
    """A compiler works, in a process of its own."""
    program = "import time\nuntil = time.monotonic() + 18\nwhile time.monotonic() < until: pass"
    subprocess.run([sys.executable, "-c", program], check=True)


PAUSING = (sleep, nap, stop, lock, poll, seldom, fetch, answer, child, load, evaluate, collect, write, compile_)
PAUSES = {each.__name__.strip("_"): each for each in PAUSING}


def main() -> None:
    """Train, and pause once."""
    pause, step = PAUSES[sys.argv[1]], int(sys.argv[2])
    del sys.argv[1:3]
    train_step = train_lm.train_step

    def pausing(training: train_lm.Training, done: int) -> tuple[float, float]:
        if training.place.rank == RANK and done == step:
            pause()
        return train_step(training, done)

    train_lm.train_step = pausing
    train_lm.main()


if __name__ == "__main__":
    main()

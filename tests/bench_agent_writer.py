"""Writes ordinary lines into the kernel log, steadily: `python -m tests.bench_agent_writer LINES_PER_S SECONDS`."""

import os
import sys
import time

BATCHES_PER_S = 20


def main() -> None:
    """Write until the time is up."""
    rate, seconds = int(sys.argv[1]), float(sys.argv[2])
    until = time.monotonic() + seconds
    number = 0
    while time.monotonic() < until:
        began = time.monotonic()
        for _ in range(rate // BATCHES_PER_S):
            number += 1
            descriptor = os.open("/dev/kmsg", os.O_WRONLY)  # one each: the kernel limits what one may write
            os.write(descriptor, f"<6>nfs: server storage{number % 7} not responding, still trying {number}\n".encode())
            os.close(descriptor)
        time.sleep(max(0.0, began + 1 / BATCHES_PER_S - time.monotonic()))


if __name__ == "__main__":
    main()

"""A stand-in for /dev/kmsg: one write is one record, for one reader.

A pipe in packet mode.  Other processes open it by its path too, as long as this one lives.  Unlike the device, a record
that one reader has read is gone for others.
"""

import fcntl
import mmap
import os

SLOTS = 256  # records that wait to be read; then the writer waits
PAGE = mmap.PAGESIZE  # of which a pipe has one a record
RECORD_BYTES_MAX = 4096


class FakeKmsg:
    """Give `path` to a reader; `record` writes as the kernel does."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_DIRECT | os.O_CLOEXEC)
        fcntl.fcntl(self._write, fcntl.F_SETPIPE_SZ, SLOTS * PAGE)
        self.path = f"/proc/{os.getpid()}/fd/{self._read}"
        self.sequence = 0

    def record(self, text: str, *, sequence: int | None = None, facility: int = 0, more: str = "") -> int:
        """Write one record and return its number; `text` must be escaped, `more` holds ` KEY=value` lines."""
        number = self.sequence if sequence is None else sequence
        self.sequence = number + 1
        self.raw(f"{facility << 3 | 4},{number},{1000 * number},-;{text}\n{more}".encode())
        return number

    def raw(self, data: bytes) -> None:
        """Write bytes as one record."""
        os.write(self._write, data)

    def empty(self) -> None:
        """Throw away what nobody has read; a blocked writer goes on."""
        os.set_blocking(self._read, False)
        try:
            while os.read(self._read, RECORD_BYTES_MAX):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        """Give the pipe back."""
        os.close(self._read)
        os.close(self._write)

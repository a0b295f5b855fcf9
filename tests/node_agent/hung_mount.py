"""Runs a command beside a file system that never answers: `python -m tests.node_agent.hung_mount DIRECTORY COMMAND...`.

Mounts a FUSE file system whose server takes requests and answers none, as a lost NFS or Lustre server does: whoever
touches it sleeps in the kernel and cannot be killed.  Run it below `unshare --mount`, so that nobody else meets it.
Exits with the command's code; then the mount is gone, and its sleepers wake.
"""

import ctypes
import os
import struct
import subprocess
import sys
import threading

INIT = 26
HEADER = struct.Struct("<IIQQIIII")  # length, operation, unique, node, uid, gid, pid, padding
ANSWER = struct.Struct("<IiQ")  # length, error, unique
INIT_ANSWER = struct.Struct("<IIIIHHIIHH8I")


def serve(device: int) -> None:
    """Answer the kernel's greeting, and nothing else."""
    while True:
        try:
            request = os.read(device, 1 << 17)
        except OSError:
            return
        _, operation, unique, *_ = HEADER.unpack_from(request)
        if operation == INIT:
            body = INIT_ANSWER.pack(7, 31, 0, 0, 12, 10, 4096, 1, 32, 0, *[0] * 8)
            os.write(device, ANSWER.pack(ANSWER.size + len(body), 0, unique) + body)


def main() -> int:
    """Mount, run, and let go."""
    where, *command = sys.argv[1:]
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"hung", where.encode(), b"fuse.hung", 0, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), where)
    threading.Thread(target=serve, args=(device,), daemon=True).start()
    code = subprocess.run(command, check=False, timeout=180).returncode
    libc.umount2(where.encode(), 2)  # MNT_DETACH
    os.close(device)
    return code


if __name__ == "__main__":
    sys.exit(main())

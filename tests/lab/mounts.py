"""Mounts of others, in a mount namespace of our own.

A new namespace copies every mount: what a test beside us has made, and will unmount, would live on in the copy, and
with it the loop device and the disk below.
"""

import tempfile

LET_GO = (
    f"{{ grep -o ' {tempfile.gettempdir()}/[^ ]* ' /proc/self/mounts | tac | xargs -r -n1 umount --lazy; }} 2>/dev/null"
)
"""For `sh`, first thing in the namespace: leave what tests have mounted."""

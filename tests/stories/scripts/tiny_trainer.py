"""A script that trains and saves as Hugging Face's Trainer does, without any package: steps of a number, at 2 ranks.

It dies in its save of step 10 once, and aborts in its exit after the last step.
"""

import argparse
import json
import os
import pickle
import struct
import sys
import time
import zipfile
from pathlib import Path

try:
    from transformers import Trainer
except ImportError:
    Trainer = object

STEPS, EVERY = 20, 5


def archive(path: Path, value: object) -> None:
    """Write what `torch.save` would."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(value, protocol=2))
        file.writestr("archive/byteorder", "little")
        file.writestr("archive/version", "3\n")


def save(out: Path, step: int, x: int) -> None:
    place = out / f"checkpoint-{step}"
    place.mkdir(exist_ok=True)
    header = json.dumps({"x": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}).encode()
    header += b" " * (-len(header) % 8)
    (place / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<q", x))
    if step == 10 and not (out / "died").exists():
        (out / "died").touch()
        os.kill(os.getpid(), 9)
    archive(place / "optimizer.pt", {"state": x})
    archive(place / "scheduler.pt", {"last_epoch": step})
    for rank in range(2):
        archive(place / f"rng_state_{rank}.pth", {"rank": rank})
    (place / "trainer_state.json").write_text(json.dumps({"global_step": step, "max_steps": STEPS}))


parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--resume_from_checkpoint")
options = parser.parse_args()
out, rank = Path(options.output_dir), int(os.environ["RANK"])
out.mkdir(exist_ok=True)
step, x = 0, 1
if options.resume_from_checkpoint:
    found = Path(options.resume_from_checkpoint)
    step = json.loads((found / "trainer_state.json").read_text())["global_step"]
    (x,) = struct.unpack("<q", (found / "model.safetensors").read_bytes()[-8:])
with (out / f"rows-{rank}").open("a") as rows:
    rows.write(f"begins {step} {os.environ['STEPKEEPER_RESUME_FROM']}\n")
    while step < STEPS:
        step, x = step + 1, (x * 1103515245 + 12345) % 2**31
        time.sleep(0.05)
        rows.write(f"{step} {x}\n")
        rows.flush()
        if rank == 0 and step % EVERY == 0:
            save(out, step, x)
if rank == 0:
    sys.stderr.write("terminate called without an active exception\n")
    os.abort()

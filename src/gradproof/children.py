"""How gradproof starts processes of its own: they find this very package, and are part of nobody's training."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ATTACH = str(
    Path(__file__).resolve().parent / "attach"
)  # on PYTHONPATH, it attaches to processes we did not start

# of a launcher, a process group or a parent that watches: none of it is meant for us
NOT_OURS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def environment() -> dict[str, str]:
    """The environment for a process of ours, which is started in the root directory."""
    found = {
        name: value for name, value in os.environ.items() if name not in NOT_OURS and name != "GRADPROOF_RUN"
    }
    package = str(Path(__file__).resolve().parent.parent)
    others = [os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    found["PYTHONPATH"] = os.pathsep.join([package, *(p for p in others if p not in (package, ATTACH))])
    found["GRADPROOF"] = "0"
    found |= {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}  # threads that wait do not keep a core busy
    found["PYTHONUNBUFFERED"] = "1"
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that its parent has not looked after does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return True


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gradproof", *arguments]

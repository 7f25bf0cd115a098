"""Where specimens are put: written to disk by a thread beside the training, within a limit that is stated.

When the limit is reached the oldest go, but never the first: it holds what the probes saw once. Where not even one fits
on disk it is kept in memory (tmpfs) until it has been examined.
"""

from __future__ import annotations

import os
import queue
import shutil
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from gradproof.tape import label
from gradproof.tape.specimen import Specimen, save

MOST = 64  # specimens of a run
SHARE_OF_DISK = 0.25  # of what is free, for the specimens of one run
LARGEST_SHARE = 32 << 30  # bytes, however much is free
LEAST_SHARE = 1 << 30
MOST_WAITING = 4  # specimens that are still to be written
IN_MEMORY = Path("/dev/shm")


class Shelf:
    """The specimens of one run."""

    def __init__(self, run: Path, limit: int | None = None) -> None:
        self.path = run.absolute() / "specimens"
        self.limit = limit if limit is not None else default_limit(run)
        self.broken = ""
        self.pushed_out = 0
        self._pid = os.getpid()
        self._kept: list[tuple[Path, int, bool]] = []  # path, bytes, whether it is a landmark
        self._queue: queue.SimpleQueue[Specimen | None] = queue.SimpleQueue()
        self._waiting = 0
        self._thread: threading.Thread | None = None
        self._away: list[Path] = []  # directories in memory

    @property
    def has_room(self) -> bool:
        """Whether another one can be put here without waiting."""
        return not self.broken and self._waiting < MOST_WAITING

    def put(self, specimen: Specimen) -> None:
        """Returns at once; the specimen is the shelf's own from here on."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="gradproof-shelf", daemon=True)
            self._thread.start()
        self._waiting += 1
        self._queue.put(specimen)

    def close(self, limit: float = 60.0) -> None:
        """Waits until what was put here is written."""
        if self._thread is None or os.getpid() != self._pid:
            return
        self._queue.put(None)
        self._thread.join(limit)
        self._thread = None

    def _write_all(self) -> None:
        while (specimen := self._queue.get()) is not None:
            try:
                self._write(specimen)
            except Exception as error:  # a full disk, a value that cannot be spelt: the training goes on
                self.broken = f"{type(error).__name__}: {error}"
            finally:
                self._waiting -= 1
                del specimen

    def _write(self, specimen: Specimen) -> None:
        size = specimen.tape.bytes()
        if size <= self.limit:
            self._make_room(size)
            self._kept.append((save(specimen, self.path), size, specimen.landmark))
            return
        if free_bytes(IN_MEMORY) < 2 * size:
            raise OSError(f"a specimen has {size >> 20} MB, and {self.limit >> 20} MB are allowed")
        away = Path(tempfile.mkdtemp(prefix=label.IN_MEMORY, dir=IN_MEMORY))
        self._away.append(away)
        held = save(specimen, away)
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / held.name).symlink_to(held)

    def _make_room(self, size: int) -> None:
        while self._kept[1:] and (len(self._kept) >= MOST or self._held() + size > self.limit):
            # the oldest that is no landmark, else the oldest; never the first
            lesser = (place for place, kept in enumerate(self._kept) if place and not kept[2])
            path, *_ = self._kept.pop(next(lesser, 1))
            self.pushed_out += 1
            with suppress(OSError):
                shutil.rmtree(path)

    def _held(self) -> int:
        return sum(size for _, size, _ in self._kept)

    def clear_away(self) -> None:
        """What was only in memory is gone once it has been examined."""
        for away in self._away:
            shutil.rmtree(away, ignore_errors=True)
        for link in self.path.glob("step-*") if self._away else ():
            if link.is_symlink():
                link.unlink()

    def describe(self) -> dict[str, float | int | str]:
        return {
            "kept": len(self._kept),
            "bytes": self._held(),
            "limit": self.limit,
            "pushed_out": self.pushed_out,
            "broken": self.broken,
        }


def default_limit(run: Path) -> int:
    where = run if run.exists() else run.parent if run.parent.exists() else Path(".")
    return int(min(LARGEST_SHARE, max(LEAST_SHARE, SHARE_OF_DISK * free_bytes(where))))


def free_bytes(path: Path) -> int:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0


def available_memory() -> int:
    """Bytes that the host could still give; a large number where nobody says."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 1 << 62

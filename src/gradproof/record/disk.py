"""The files of a run as they are written: whole records appended, whole files replaced, in order.

A network's disk may stop answering in the middle of a call, and no call can be taken back: there, where nobody knows
what stands behind a disk, and where one has kept training waiting, all of it is done by a thread.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gradproof.files import open_to_append, open_to_write, replace_file

# file systems of this machine's own disks and memory; whatever is none of them may be a program, or another machine
LOCAL = frozenset(
    (
        *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "reiserfs", "nilfs2"),
        *("tmpfs", "ramfs", "rootfs", "overlay", "aufs", "fuseblk", "ntfs3", "vfat", "exfat", "hfsplus"),
    )
)
MOST_WAITING = 32 << 20  # bytes that a disk may be behind
NO_ANSWER = "it does not answer, or is too slow"
NONE = (-1, (0, 0))  # no descriptor, of no file


class Files:
    """Those of one run. A script may have closed a descriptor of ours, and opened one of its own under its number."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened: dict[str, tuple[int, tuple[int, int]]] = {}  # descriptor, and which file it stands for

    def append(self, name: str, data: bytes) -> None:
        """At the end of each step, and all in one call: between the kernels of a tiny step every other one is dear."""
        descriptor, identity = self._opened.get(name, NONE)
        try:
            found = os.fstat(descriptor)
            if (found.st_dev, found.st_ino) != identity:
                descriptor, found = self._open(name)
        except OSError:  # none was opened, or somebody has closed it
            descriptor, found = self._open(name)
        if found.st_nlink == 0:
            raise FileNotFoundError(f"{name} was deleted")
        if os.write(descriptor, data) != len(data):
            raise OSError("only part of a record could be written")

    def write_at(self, name: str, place: int, data: bytes) -> None:
        """Into a file that is no longer than it has to be; made if it is not there."""
        descriptor = open_to_write(self.path / name)
        try:
            if os.pwrite(descriptor, data, place) != len(data):
                raise OSError("only part of a record could be written")
        finally:
            os.close(descriptor)

    def replace(self, name: str, data: bytes) -> None:
        replace_file(self.path / name, data)

    def make_empty(self, name: str) -> None:
        os.close(open_to_append(self.path / name))

    def close_file(self, name: str) -> None:
        descriptor, identity = self._opened.pop(name, NONE)
        with suppress(OSError):
            found = os.fstat(descriptor)
            if (found.st_dev, found.st_ino) == identity:
                os.close(descriptor)

    def close(self) -> None:
        for name in list(self._opened):
            self.close_file(name)

    def _open(self, name: str) -> tuple[int, os.stat_result]:
        descriptor = open_to_append(self.path / name)
        found = os.fstat(descriptor)
        self._opened[name] = descriptor, (found.st_dev, found.st_ino)
        return descriptor, found


class Aside:
    """Does one thing after the other in a thread; whoever asks for it never waits."""

    def __init__(self) -> None:
        self.error: OSError | None = None
        self._put = self._done = 0  # bytes, each counted by one thread
        self._queue: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._do_all, name="gradproof-disk", daemon=True)
        self._thread.start()

    def put(self, work: Callable[..., None], *args: Any) -> None:
        """OSError where something has failed, or too much waits already."""
        if self.error is not None:
            raise self.error
        if self._put - self._done > MOST_WAITING:
            raise OSError(NO_ANSWER)
        self._put += _size(args)
        self._queue.put((work, args))

    def finish(self, limit: float) -> None:
        """Waits for the end; OSError when nothing was done for so many seconds."""
        self.leave()
        done = -1
        while self._thread.is_alive() and done != self._done:
            done = self._done
            self._thread.join(limit)
        if self.error is not None:
            raise self.error
        if self._thread.is_alive():
            raise OSError(NO_ANSWER)

    def leave(self) -> None:
        """Nothing more will be put here."""
        self._queue.put(None)

    def _do_all(self) -> None:
        while (item := self._queue.get()) is not None:
            work, args = item
            try:
                if self.error is None:
                    work(*args)
            except Exception as error:
                self.error = (
                    error if isinstance(error, OSError) else OSError(f"{type(error).__name__}: {error}")
                )
            self._done += _size(args)


def _size(args: tuple[Any, ...]) -> int:
    return sum(len(arg) for arg in args if isinstance(arg, bytes))


def is_local(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether a place lies on a disk of this machine, which always answers; also where the system does not say."""
    kind, longest = "", 0
    with suppress(OSError, ValueError, IndexError):
        real = os.path.realpath(path)
        for line in mounts.read_text(errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            where = before.split()[4].replace("\\040", " ")
            inside = real == where or real.startswith(where.rstrip("/") + "/")
            if inside and len(where) >= longest:
                kind, longest = after.split()[0], len(where)
    return not kind or kind in LOCAL

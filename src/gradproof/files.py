"""Opens what really is a file: no link is followed, no pipe is waited for, nothing is read without a bound.

A run may come from anywhere. A link in it may lead to somebody's letters, or have them overwritten.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from pathlib import Path
from typing import BinaryIO

SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class NotAFile(OSError):
    """There is something in a file's place, or more than it may hold; says what, in a few words."""


def open_file(path: str | os.PathLike) -> BinaryIO:
    """A file to be read; NotAFile for a link, a pipe, a directory or a device, FileNotFoundError for nothing."""
    descriptor = _open(path, os.O_RDONLY)
    return os.fdopen(descriptor, "rb")


def read_file(path: str | os.PathLike, most: int) -> bytes:
    """All of a file that has `most` bytes at most."""
    with open_file(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        data = stream.read(most + 1) if size <= most else b""  # it may grow while it is read
    if max(size, len(data)) > most:
        raise NotAFile(
            f"it has more than {most >> 20} MB" if most >= 1 << 20 else f"it has more than {most} bytes"
        )
    return data


def has_file(path: str | os.PathLike) -> bool:
    """Whether a file is there, itself: no link, no pipe, no directory."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (OSError, ValueError):
        return False


def open_to_append(path: str | os.PathLike) -> int:
    """The descriptor of a file to which whole records are appended; made if it is not there."""
    return _open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def open_to_write(path: str | os.PathLike) -> int:
    """The descriptor of a file of which parts are written over; made if it is not there."""
    return _open(path, os.O_WRONLY | os.O_CREAT)


def replace_file(path: str | os.PathLike, data: bytes) -> None:
    """Put a new file in a place: what was there, a link too, is gone, and nobody reads half of it."""
    draft = Path(f"{os.fspath(path)}.tmp{os.getpid()}")
    with contextlib.suppress(OSError):
        draft.unlink()  # of a process that was killed; if it is a link, the link
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFE, 0o644)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def map_new_file(path: str | os.PathLike, size: int) -> mmap.mmap:
    """A new file of zeros, mapped into memory; OSError where it cannot be.

    Its room on the disk is taken here: a full disk says so now, and not later by a signal that ends the process.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | SAFE, 0o644)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        elif os.write(descriptor, bytes(size)) != size:
            raise OSError("only part of it could be written")
        return mmap.mmap(descriptor, size)
    except BaseException as error:
        os.unlink(path)
        if isinstance(error, ValueError):  # what mmap says of a file that is not as large as it should be
            raise OSError(str(error)) from None
        raise
    finally:
        os.close(descriptor)


def refuse_links(*paths: str | os.PathLike) -> None:
    """NotAFile if one of these places, which are going to be written to, is a link."""
    for path in paths:
        if os.path.islink(path):
            raise NotAFile(f"{os.fspath(path)} is a link, which is not followed")


def _open(path: str | os.PathLike, flags: int) -> int:
    try:
        descriptor = os.open(path, flags | SAFE, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotAFile("it is a link, which is not followed") from None
        if error.errno in (errno.ENXIO, errno.EISDIR):
            raise NotAFile("it is no file") from None
        raise
    except ValueError:  # a NUL in its name
        raise FileNotFoundError("no file has such a name") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotAFile("it is no file")
    return descriptor

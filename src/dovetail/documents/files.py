"""Where the files of documents are, and how one is written so that no half of it is ever seen.

A file is written beside its place under a temporary name, synced, renamed, and its folder
synced. The name is the same each time, so that what a killed process left is overwritten by the
next; a lock on it keeps two writers of one document apart. Each of these goes through
`confinement.py`. What it must not know: what is in the files.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from dovetail import PermanentError, RetryableError
from dovetail.documents.confinement import (
    OUT_VARIABLE,
    Folder,
    file_name,
    is_file_name,
    opened_folder,
    refused,
)

DEFAULT_OUT = "documents"
UNKNOWN_DAY = "unknown"

_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNWRITABLE = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP),
    *(errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG),
)


def default_out() -> Path:
    """The folder for everything that is found, where nobody names one."""
    return Path(os.environ.get(OUT_VARIABLE, "").strip() or DEFAULT_OUT).absolute()


def checked_id(document_id: object) -> str:
    """The id, if a file can be named after it."""
    if isinstance(document_id, str) and is_file_name(document_id):
        return document_id
    raise PermanentError(
        f"document_id {document_id!r}: it becomes the name of a file, so it is 1 to 128 letters, "
        "digits, '.', '_' or '-', and begins with a letter or a digit",
        type="invalid_params",
    )


def json_path(out: Path, document_id: str) -> Path:
    return out / "json" / f"{document_id}.json"


def parquet_path(out: Path, document_id: str, day: str | None, kind: str) -> Path:
    """By the document's own day and not by today: a rerun on another day is the same file."""
    day, kind = file_name(day or UNKNOWN_DAY), file_name(kind)
    return out / "parquet" / f"day={day}" / f"type={kind}" / f"{document_id}.parquet"


def is_result(kind: str, out: Path, document_id: str, path: str | Path) -> bool:
    """Whether that is where `parquet_path` or `json_path` puts this document."""
    if kind == "json":
        return Path(path) == json_path(out, document_id)
    found = Path(path)
    parts = found.relative_to(out).parts if found.is_relative_to(out) else ()
    if len(parts) != 4 or (parts[0], parts[3]) != ("parquet", f"{document_id}.parquet"):
        return False
    return all(
        part.startswith(key) and is_file_name(part.removeprefix(key))
        for key, part in zip(("day=", "type="), parts[1:3], strict=True)
    )


def checked_result(kind: str, out: Path, document_id: str, path: str) -> Path:
    """The path, if a result of this document can be there. Raises `PermanentError`.

    A review deletes the file of an earlier partition: nothing may lead it to another file.
    """
    if is_result(kind, out, document_id, path):
        return Path(path)
    partition = "" if kind == "json" else "day=…/type=…/"
    place = out / kind / f"{partition}{document_id}.{kind}"
    raise refused(
        path, f" is not where '{document_id}' is saved as {kind}, {place}; documents may use"
    )


def write_atomically(path: Path, content: bytes) -> bool:
    """Put the content there, whole and for good; False if those bytes were there already.

    Safe to repeat and to be killed in: before it returns there is the old file or the new one.
    A full disk is a `RetryableError`; a place that cannot be written is a `PermanentError`.
    """
    try:
        with opened_folder(path.parent, create=True) as folder:
            if _holds(folder, path.name, content):
                _sweep(folder, path.name)
                # Whoever put it there may have been killed before the folder was synced.
                folder.sync()
                return False
            _replace(folder, path.name, content)
    except OSError as error:
        raise explained(error, path) from error
    return True


def read_file(path: Path) -> bytes:
    """The content of a file that was written here. Raises `OSError`; a link is none."""
    with opened_folder(path.parent) as folder:
        file = folder.open(path.name, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(file, "rb") as opened:
        return opened.read()


def saved(path: Path, content: bytes) -> dict[str, Any]:
    """`write_atomically`, and what a step says of it."""
    write_atomically(path, content)
    return {"path": str(path), "bytes": len(content), "sha256": sha256(content).hexdigest()}


def remove(path: Path) -> bool:
    """Take a file away for good; False if there was none."""
    try:
        with opened_folder(path.parent) as folder:
            folder.unlink(path.name)
            folder.sync()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise explained(error, path) from error
    return True


def explained(error: OSError, path: Path) -> RetryableError | PermanentError:
    """What went wrong, and what would help."""
    if error.errno in _FULL:
        return RetryableError(
            f"{path}: the disk is full ({error.strerror}); free some space", type="disk_full"
        )
    if error.errno in _UNWRITABLE:
        return PermanentError(
            f"{path}: cannot be written: {error.strerror}; --out or {OUT_VARIABLE} names "
            "another folder",
            type="not_writable",
        )
    return RetryableError(f"{path}: cannot be written: {error.strerror}", type="write_failed")


def _holds(folder: Folder, name: str, content: bytes) -> bool:
    try:
        file = folder.open(name, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):  # a link is replaced, not followed
            return False
        raise
    with os.fdopen(file, "rb") as opened:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_size != len(content):
            return False
        return opened.read() == content


def _replace(folder: Folder, name: str, content: bytes) -> None:
    temporary = _temporary(name)
    handle = _lock(folder, temporary)
    try:
        os.ftruncate(handle, 0)
        view = memoryview(content)
        while view:
            view = view[os.write(handle, view) :]
        os.fsync(handle)
        folder.replace(temporary, name)
    except BaseException:
        with suppress(FileNotFoundError):
            folder.unlink(temporary)  # still ours: the lock is held
        raise
    finally:
        os.close(handle)
    folder.sync()


def _sweep(folder: Folder, name: str) -> None:
    """Take away what a killed process left of other content."""
    temporary = _temporary(name)
    try:
        folder.stat(temporary)
    except FileNotFoundError:
        return
    handle = _lock(folder, temporary)
    with suppress(FileNotFoundError):
        folder.unlink(temporary)
    os.close(handle)


def _temporary(name: str) -> str:
    return f".{name}.part"


def _lock(folder: Folder, temporary: str) -> int:
    """The temporary file, open and ours alone until it is closed."""
    while True:
        handle = folder.open(temporary, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(handle), folder.stat(temporary)):
                return handle
        except FileNotFoundError:
            pass  # the one before us renamed it into place while we waited
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)

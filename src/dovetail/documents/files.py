"""Where the files of documents are, and how one is written so that no half of it is ever seen.

A file is written beside its place under a temporary name, synced, renamed, and its folder
synced. The name is the same each time, so that what a killed process left is overwritten by the
next; a lock on it keeps two writers of one document apart. What it must not know: what is in
the files.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

from dovetail import PermanentError, RetryableError

OUT_VARIABLE = "DOVETAIL_DOCUMENTS_OUT"
DEFAULT_OUT = "documents"
ROOTS_VARIABLE = "DOVETAIL_DOCUMENTS_ROOTS"

UNKNOWN_DAY = "unknown"

# It becomes the name of a file: no separator, no dot in front, nothing a shell would expand.
_DOCUMENT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNWRITABLE = (
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG),
)


def default_out() -> Path:
    """The folder for everything that is found, where nobody names one."""
    return Path(os.environ.get(OUT_VARIABLE, "").strip() or DEFAULT_OUT).absolute()


def checked_place(path: Path) -> Path:
    """The path, if documents may be read and written there.

    Params come from whoever may trigger a run; on a machine that others trigger runs on, the
    operator names the folders that these may use.
    """
    given = os.environ.get(ROOTS_VARIABLE, "")
    roots = [Path(root.strip()).resolve() for root in given.split(",") if root.strip()]
    if not roots or any(path.resolve().is_relative_to(root) for root in roots):
        return path
    raise PermanentError(
        f"{path} is in none of the folders that documents may use on this worker "
        f"({ROOTS_VARIABLE}): {', '.join(map(str, roots))}",
        type="not_allowed",
    )


def checked_id(document_id: object) -> str:
    """The id, if a file can be named after it."""
    if isinstance(document_id, str) and _DOCUMENT_ID.fullmatch(document_id):
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
    folder = out / "parquet" / f"day={day or UNKNOWN_DAY}" / f"type={kind}"
    return folder / f"{document_id}.parquet"


def write_atomically(path: Path, content: bytes) -> bool:
    """Put the content there, whole and for good; False if those bytes were there already.

    Safe to repeat and to be killed in: before it returns there is the old file or the new one.
    A full disk is a `RetryableError`; a place that cannot be written is a `PermanentError`.
    """
    try:
        if _holds(path, content):
            _sweep(path)
            # Whoever put it there may have been killed before the folder was synced.
            _sync_folder(path.parent)
            return False
        _replace(path, content)
    except OSError as error:
        raise explained(error, path) from error
    return True


def saved(path: Path, content: bytes) -> dict[str, Any]:
    """`write_atomically`, and what a step says of it."""
    write_atomically(path, content)
    return {"path": str(path), "bytes": len(content), "sha256": sha256(content).hexdigest()}


def remove(path: Path) -> bool:
    """Take a file away for good; False if there was none."""
    try:
        path.unlink()
        _sync_folder(path.parent)
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


def _holds(path: Path, content: bytes) -> bool:
    try:
        return path.stat().st_size == len(content) and path.read_bytes() == content
    except FileNotFoundError:
        return False


def _replace(path: Path, content: bytes) -> None:
    temporary = _temporary(path)
    handle = _lock(temporary)
    try:
        os.ftruncate(handle, 0)
        view = memoryview(content)
        while view:
            view = view[os.write(handle, view) :]
        os.fsync(handle)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # still ours: the lock is held
        raise
    finally:
        os.close(handle)
    _sync_folder(path.parent)


def _sweep(path: Path) -> None:
    """Take away what a killed process left of other content."""
    temporary = _temporary(path)
    if temporary.exists():
        handle = _lock(temporary)
        temporary.unlink(missing_ok=True)
        os.close(handle)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _lock(temporary: Path) -> int:
    """The temporary file, open and ours alone until it is closed."""
    while True:
        handle = _open(temporary)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            mine, there = os.fstat(handle), temporary.stat()
            if (mine.st_ino, mine.st_dev) == (there.st_ino, there.st_dev):
                return handle
        except FileNotFoundError:
            pass  # the one before us renamed it into place while we waited
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _open(temporary: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(temporary, flags, 0o666)
    except FileNotFoundError:
        make_folder(temporary.parent)
        return os.open(temporary, flags, 0o666)


def make_folder(folder: Path) -> None:
    """With its parents, each of them there for good."""
    missing = [folder]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for one in reversed(missing):
        one.mkdir(exist_ok=True)
        _sync_folder(one.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

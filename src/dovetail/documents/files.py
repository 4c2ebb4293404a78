"""Every file of documents is opened here: within the roots, and through no link.

Paths come from params, configs, outputs and documents, and none of these is trusted. A path is
resolved, links included; what it resolves to must be in a root; then each folder of it is opened
by its handle, one after the other, and a link among them is refused. So a link that is put there
between the look and the use leads nowhere. Who reads, writes, renames or deletes a file does it
by its name in such a folder. What this file must not know: what is in the files.

Where the files of documents are, and how one is written so that no half of it is ever seen.

A file is written beside its place under a temporary name, synced, renamed, and its folder
synced. The name is the same each time, so that what a killed process left is overwritten by the
next; a lock on it keeps two writers of one document apart. Each of these goes through
`confinement.py`. What it must not know: what is in the files.

Which files are documents, what each is called, and which are done already.

A folder is asked for what we can read, by the ends of names: what a file really is, its bytes say
when it is read. What it must not know: how a document is read, or who runs what.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import os
import re
import stat
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail import DovetailError, PermanentError, RetryableError

if TYPE_CHECKING:
    from dovetail.documents.reviews import Review, Reviews


ROOTS_VARIABLE = "DOVETAIL_DOCUMENTS_ROOTS"
OUT_VARIABLE = "DOVETAIL_DOCUMENTS_OUT"

FILE_MODE = 0o600
FOLDER_MODE = 0o700

LONGEST_NAME = 100
MOST_SHOWN = 5
"""Roots that an error names."""

# No separator, no dot in front, nothing that a shell would expand.
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]")

# O_PATH needs no permission to list a folder, only to pass through it, as a plain path does.
_STEP = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_named: frozenset[str] = frozenset()


# --- names -------------------------------------------------------------------------------------


def is_file_name(value: object) -> bool:
    """Whether a file can be named so, in any folder, and stays in it."""
    return isinstance(value, str) and _FILE_NAME.fullmatch(value) is not None


def file_name(value: object) -> str:
    """The value, if a file can be named so; else a name that is made of it, for it alone."""
    text = str(value)
    if is_file_name(text):
        return text
    letters = _NOT_IN_A_NAME.sub("_", text)[:LONGEST_NAME].lstrip("._-") or "x"
    # a/b and a:b must not share a name.
    digits = sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{letters}-{digits}"


# --- roots -------------------------------------------------------------------------------------


def allow(*paths: str | Path) -> None:
    """Also these, in this process: the paths that were named on its command line.

    The setting wins: where it is set, nothing else is allowed.
    """
    global _named
    # Resolved now: what is put in its place later is not what was named.
    _named |= {os.path.realpath(path) for path in paths}


def roots() -> frozenset[str]:
    """The folders and files that documents may use in this process.

    Those of the setting. Where it is not set: the working folder, the default folder of results,
    and what was named on the command line.
    """
    try:
        here = os.getcwd()  # noqa: PTH109  (a key, not a path yet)
    except FileNotFoundError:  # the folder was deleted under us
        here = ""
    settings = (os.environ.get(name, "").strip() for name in (ROOTS_VARIABLE, OUT_VARIABLE))
    return _roots(*settings, here, _named)


@lru_cache(maxsize=32)
def _roots(given: str, out: str, here: str, named: frozenset[str]) -> frozenset[str]:
    """Resolved once: whoever can write in one root must not move another by a link."""
    if given:
        paths = [part.strip() for part in given.split(",") if part.strip()]
    else:
        paths = [path for path in (here, out, *named) if path]
    return frozenset(os.path.realpath(path) for path in paths)


def confined(path: str | Path) -> Path:
    """What the path resolves to, if that is in a root. Raises `PermanentError`."""
    if not _can_be_a_path(str(path)):
        raise PermanentError(f"{str(path)!r} is no path", type="invalid_params")
    real = os.path.realpath(path)
    if _is_within(real):
        return Path(real)
    leads = "" if real == str(path) else f" leads to {real}, which"
    raise refused(path, f"{leads} is in none of the folders that documents may use here")


def _is_within(real: str) -> bool:
    """By looking up its parents: a command line may have named thousands of roots."""
    allowed = roots()
    while real not in allowed:
        parent = os.path.dirname(real)  # noqa: PTH120
        if parent == real:
            return False
        real = parent
    return True


def refused(path: str | Path, why: str) -> PermanentError:
    """The error of a path that must not be used: names the path, the roots, and the setting."""
    allowed = sorted(roots())
    shown = ", ".join(allowed[:MOST_SHOWN]) or "none"
    if len(allowed) > MOST_SHOWN:
        shown += f" and {len(allowed) - MOST_SHOWN:,} more"
    is_set = os.environ.get(ROOTS_VARIABLE, "").strip()
    setting = f"{ROOTS_VARIABLE} names {'them' if is_set else 'others; it is not set'}"
    return PermanentError(f"{path}{why}: {shown} ({setting})", type="not_allowed")


# --- folders -----------------------------------------------------------------------------------


class Folder:
    """A folder by its handle: its path may lead elsewhere by now, its handle does not.

    Names are of files directly in it. A link is never followed: it can be replaced and deleted.
    """

    def __init__(self, handle: int, path: Path) -> None:
        self._handle = handle
        self.path = path

    def close(self) -> None:
        os.close(self._handle)

    def open(self, name: str, flags: int) -> int:
        """The file's handle. One that is made is for this user alone, whatever the umask."""
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(_checked(name), flags, FILE_MODE, dir_fd=self._handle)

    def stat(self, name: str) -> os.stat_result:
        return os.stat(_checked(name), dir_fd=self._handle, follow_symlinks=False)

    def replace(self, name: str, new_name: str) -> None:
        os.replace(
            _checked(name), _checked(new_name), src_dir_fd=self._handle, dst_dir_fd=self._handle
        )

    def unlink(self, name: str) -> None:
        os.unlink(_checked(name), dir_fd=self._handle)

    def sync(self) -> None:
        """What was made, renamed or deleted in it is so for good."""
        _sync(self._handle)

    def make_file(self, name: str) -> None:
        """An empty file of this user alone, unless there is a file.

        It is not even opened where that can be avoided: to close it would drop the locks that
        this process has on it by another handle, as a database has.
        """
        with suppress(FileExistsError):
            if hasattr(os, "O_PATH"):  # Linux: elsewhere only root may
                os.mknod(_checked(name), FILE_MODE | stat.S_IFREG, dir_fd=self._handle)
            else:
                os.close(self.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL))


@contextmanager
def opened_folder(path: str | Path, *, create: bool = False) -> Iterator[Folder]:
    """The folder, if it is in a root. Raises `PermanentError` if not, `OSError` as `open` does.

    With `create` it is made where it is missing, with its parents, for this user alone.
    """
    folder = open_folder(path, create=create)
    try:
        yield folder
    finally:
        folder.close()


def open_folder(path: str | Path, *, create: bool = False) -> Folder:
    """As `opened_folder`, for who closes it."""
    if plain := _plainly_within(path):
        with suppress(_LinkFound):
            return _entered(plain, create=create)
    try:
        return _entered(confined(path), create=create)
    except _LinkFound:
        raise _swapped(path) from None


@contextmanager
def opened_file(path: str | Path) -> Iterator[int]:
    """The handle of a file that is read, if what the path resolves to is in a root.

    Raises as `opened_folder`. Does not wait for whoever writes to a pipe.
    """
    file = None
    if plain := _plainly_within(path):
        with suppress(_LinkFound):
            file = _opened(plain)
    if file is None:
        try:
            file = _opened(confined(path))
        except _LinkFound:
            raise _swapped(path) from None
    try:
        yield file
    finally:
        os.close(file)


def is_file(path: str | Path) -> bool:
    """Whether there is a regular file. A link is none. Raises `PermanentError` out of the roots."""
    path = Path(path)
    try:
        with opened_folder(path.parent) as folder:
            return stat.S_ISREG(folder.stat(path.name).st_mode)
    except OSError:
        return False


class _LinkFound(Exception):
    """On the way to what was taken for a path without links."""


def _plainly_within(path: str | Path) -> Path | None:
    """The path, if it is in a root as it is written: then the way there tells if it has links.

    To resolve it before costs as much again, and is left to paths that have some.
    """
    text = str(path)
    is_plain = text.startswith("/") and os.path.normpath(text) == text and _can_be_a_path(text)
    return Path(text) if is_plain and _is_within(text) else None


def _opened(real: Path) -> int:
    if not real.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(real))
    folder = _entered(real.parent, create=False)  # which need not be in a root itself
    try:
        return folder.open(real.name, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _LinkFound from None
        raise
    finally:
        folder.close()


def _entered(real: Path, *, create: bool) -> Folder:
    """The folder, step by step from the top. Raises `_LinkFound`, `OSError`."""
    handle = os.open("/", _STEP)
    try:
        for name in real.parts[1:]:
            inner = _step(handle, name, create=create)
            os.close(handle)
            handle = inner
    except BaseException:
        os.close(handle)
        raise
    return Folder(handle, real)


def _step(handle: int, name: str, *, create: bool) -> int:
    try:
        return os.open(name, _STEP, dir_fd=handle)
    except FileNotFoundError:
        if not create:
            raise
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and _is_link(handle, name):
            raise _LinkFound from None
        raise
    with suppress(FileExistsError):  # another process makes it, too
        os.mkdir(name, FOLDER_MODE, dir_fd=handle)
        _sync(handle)
    return _step(handle, name, create=False)


def _is_link(handle: int, name: str) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=handle, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _swapped(path: str | Path) -> OSError | PermanentError:
    """A link where none was a moment ago, unless links lead in a circle: those resolve to one."""
    try:
        os.path.realpath(path, strict=True)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return error
    return refused(path, " became a link while it was used; documents may use")


def _checked(name: str) -> str:
    if not name or "/" in name or name in (".", "..") or not _can_be_a_path(name):
        raise PermanentError(f"{name!r} is no name of a file", type="invalid_params")
    return name


def _can_be_a_path(text: str) -> bool:
    """No zero byte in it, and no half of a character."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def _sync(handle: int) -> None:
    readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=handle)
    try:
        os.fsync(readable)
    finally:
        os.close(readable)


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


# Not by `Path.resolve`, `exists` and their like: those raise for links that lead in a circle, for
# names that are too long, for unknown homes, and for what is in a folder that may not be entered.
# ruff: noqa: PTH110, PTH111, PTH112, PTH113, PTH114


TEXTS = frozenset({".pdf", ".docx", ".txt", ".text", ".html", ".htm", ".xhtml"})
IMAGES = frozenset({".png", ".jpg", ".jpeg", ".tif", ".tiff"})
WRITTEN = ("json", "parquet")
"""The folders that results are written to."""
LONGEST_SLUG = 100
ID_DIGITS = 10

_MAGIC = re.compile(r"[*?[]")


class NoDocuments(DovetailError):
    """A path that leads to nothing that could be processed."""

    type = "invalid_input"


@dataclass
class Findings:
    """What the paths led to."""

    files: list[str] = field(default_factory=list)
    """Absolute, without symbolic links, each once, in the order of the paths and then of names."""
    others: int = 0
    """Files of folders that are of no kind we can read."""
    images: int = 0
    """Images of folders that were left out because they were not wanted."""
    named: list[Path] = field(default_factory=list)
    """What was named, resolved: the files and folders, and of a pattern the folder it begins at."""
    _seen: set[Path] = field(default_factory=set)

    def take(self, path: Path) -> None:
        if path not in self._seen:
            self._seen.add(path)
            self.files.append(str(path))


def find(paths: Sequence[str], out: Path, *, images: bool = True) -> Findings:
    """The documents behind files, folders and patterns; nothing of `out` or of hidden folders.

    A file that is named is taken whatever its name ends with. Raises `NoDocuments`.
    """
    found = Findings()
    kept_out = _real(out)
    for path in (path for given in paths for path in _expanded(given, found.named)):
        if os.path.isfile(path):
            found.take(path)
        elif not os.path.isdir(path):
            raise NoDocuments(f"{path} is neither a file nor a folder")
        else:
            for inside in _walk(path, kept_out):
                end = inside.suffix.lower()
                if end in TEXTS or (images and end in IMAGES):
                    found.take(inside)
                else:
                    found.images += end in IMAGES
                    found.others += end not in IMAGES
    if not found.files:
        ends = " ".join(sorted(TEXTS | IMAGES if images else TEXTS))
        others = found.others + found.images
        beside = f", only {others:,} of other kinds" if others else ""
        raise NoDocuments(
            f"no document in {', '.join(paths)}{beside}; in folders it looks for {ends}; "
            "a file that is named itself is always taken"
        )
    return found


def _real(path: str | Path) -> Path:
    return Path(os.path.realpath(path))


def _expanded(given: str, named: list[Path]) -> Iterator[Path]:
    """The path itself, or what matches it: patterns in quotes are left to us by the shell."""
    if "\0" in given:
        raise NoDocuments(f"{given!r} is no path")
    path = os.path.expanduser(given)
    if os.path.exists(path):
        named.append(_real(path))
        yield named[-1]
    elif _MAGIC.search(given):
        # Not Path.glob, for which hidden files match, too.
        found = glob.iglob(path, recursive=True)  # noqa: PTH207
        matches = sorted(match for match in found if os.path.exists(match))  # no links to nothing
        if not matches:
            raise NoDocuments(f"nothing matches {given}")
        parts = Path(path).parts
        fixed = next(place for place, part in enumerate(parts) if _MAGIC.search(part))
        named.append(_real(Path(*parts[:fixed])))
        yield from map(_real, matches)
    else:
        what = "leads nowhere" if os.path.islink(path) else "there is no such file or folder"
        raise NoDocuments(f"{given}: {what}")


def _walk(folder: Path, kept_out: Path) -> Iterator[Path]:
    """Every regular file below, sorted; links to folders are not followed, they may go round."""

    def complain(error: OSError) -> None:
        raise NoDocuments(f"{error.filename} cannot be read: {error.strerror}") from None

    for name, folders, files in os.walk(folder, onerror=complain):
        here = Path(name)
        # Who names the folder of results itself means what else is in it.
        ours = WRITTEN if here == kept_out else ()
        folders[:] = sorted(
            one for one in folders if one[0] != "." and one not in ours and here / one != kept_out
        )
        for path in (here / one for one in sorted(files) if one[0] != "."):
            real = _real(path) if os.path.islink(path) else path
            if os.path.isfile(real):  # not a link to nothing, or in a circle
                yield real


def document_id(path: str) -> str:
    """The same for the same absolute path, and fit for a file's name: `invoice-7-3f9a0c11d2`."""
    letters = unicodedata.normalize("NFKD", Path(path).stem).encode("ascii", "ignore").decode()
    slug = re.sub(r"[^A-Za-z0-9._]+", "-", letters).strip("-._").lower()[:LONGEST_SLUG]
    digits = hashlib.sha256(os.fsencode(path)).hexdigest()[:ID_DIGITS]
    return f"{slug or 'document'}-{digits}"


def name_problem(path: str) -> dict[str, str] | None:
    """Why no run can be told of this path, if none can: params are text."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return {"type": "bad_name", "message": "the path is not UTF-8; rename it"}
    return None


@dataclass(frozen=True, slots=True)
class SourceDocument:
    """A file as it is now, beside what was made of it before."""

    id: str
    path: str
    sha256: str
    """Of its bytes; empty for what is too large or cannot be read."""
    review: Review | None
    is_done: bool
    """This very content of this path was extracted, saved and is up for review."""
    is_known: bool
    """This content was extracted before, of whatever path: to extract it makes no call."""


def look(path: str, out: Path, reviews: Reviews, extractor: str) -> SourceDocument:
    """What there is to do for a file. Which extractor is no matter if it is empty."""
    from dovetail.documents.extraction import cached

    name, sha256 = document_id(path), _content_hash(path)
    review = reviews.get(name)
    is_done = _covers(review, path, sha256, extractor)
    is_known = is_done or bool(sha256 and extractor and cached(sha256, out, extractor))
    return SourceDocument(name, path, sha256, review, is_done, is_known)


def _content_hash(path: str) -> str:
    """What cannot be had is left to whoever reads the file: that says what is wrong with it."""
    from dovetail.documents.extraction import content_hash
    from dovetail.documents.reading import max_bytes

    try:
        return content_hash(path, max_bytes())
    except (OSError, PermanentError):
        return ""


def _covers(review: Review | None, path: str, sha256: str, extractor: str) -> bool:
    if review is None or not sha256 or extractor not in ("", review.extractor):
        return False
    if (review.file_path, review.sha256) != (path, sha256):
        return False
    try:
        return is_file(review.json_path) and is_file(review.parquet_path)
    except PermanentError:  # a row may say anything
        return False

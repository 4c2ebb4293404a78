"""The files of documents: which paths are allowed, how to write them, which are documents.

Every file is opened here, within the roots and through no link. Paths come from params, configs,
outputs and documents, and none of these is trusted. A path is resolved, links included, and the
result must be in a root. Then each folder on the way is opened by handle, and a link among them is
refused. So a link that appears between check and use has no effect. Files are read, written,
renamed and deleted by name in such a folder.

A file is written under a temporary name in the same folder, synced and renamed; then the folder is
synced. No reader sees half a file. The temporary name is always the same, so the next write
replaces what a killed process left. A lock on it separates two writers of one document.

Documents in folders are found by file name extension; what a file really is, `reading.py` decides.
"""

from __future__ import annotations

import errno
import fcntl
import glob
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

MAX_NAME_LENGTH = 100
MAX_SHOWN_ROOTS = 5
"""How many roots an error message lists."""

# No separator, no dot in front, nothing that a shell would expand.
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]")

# O_PATH needs no permission to list a folder, only to pass through it, as a plain path does.
_STEP = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_named: frozenset[str] = frozenset()


# --- names -------------------------------------------------------------------------------------


def is_file_name(value: object) -> bool:
    """Whether this is a safe name of a file, which cannot lead out of its folder."""
    return isinstance(value, str) and _FILE_NAME.fullmatch(value) is not None


def file_name(value: object) -> str:
    """The value if it is a safe file name, else a unique safe name made from it."""
    text = str(value)
    if is_file_name(text):
        return text
    letters = _NOT_IN_A_NAME.sub("_", text)[:MAX_NAME_LENGTH].lstrip("._-") or "x"
    # a/b and a:b must not share a name.
    digits = sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{letters}-{digits}"


# --- roots -------------------------------------------------------------------------------------


def allow(*paths: str | Path) -> None:
    """Add roots for this process: the paths on its command line.

    If the setting is set, only its roots are allowed.
    """
    global _named
    # Resolved now: a link that replaces the path later must not become a root.
    _named |= {os.path.realpath(path) for path in paths}


def roots() -> frozenset[str]:
    """The folders and files that documents may use in this process.

    The roots of the setting. If it is not set: the working folder, the default folder of
    results, and the paths on the command line.
    """
    try:
        here = os.getcwd()  # noqa: PTH109  (a key, not a path yet)
    except FileNotFoundError:  # the working folder was deleted
        here = ""
    settings = (os.environ.get(name, "").strip() for name in (ROOTS_VARIABLE, OUT_VARIABLE))
    return _roots(*settings, here, _named)


@lru_cache(maxsize=32)
def _roots(given: str, out: str, here: str, named: frozenset[str]) -> frozenset[str]:
    """Resolved once: a process that can write in one root must not move another root by a link."""
    if given:
        paths = [part.strip() for part in given.split(",") if part.strip()]
    else:
        paths = [path for path in (here, out, *named) if path]
    return frozenset(os.path.realpath(path) for path in paths)


def confined(path: str | Path) -> Path:
    """The resolved path, if it is in a root. Raises `PermanentError`."""
    if not _can_be_a_path(str(path)):
        raise PermanentError(f"{str(path)!r} is no path", type="invalid_params")
    real = os.path.realpath(path)
    if _is_within(real):
        return Path(real)
    leads = "" if real == str(path) else f" leads to {real}, which"
    raise refused(path, f"{leads} is in none of the folders that documents may use here")


def _is_within(real: str) -> bool:
    """Looks up each parent: a command line may name thousands of roots."""
    allowed = roots()
    while real not in allowed:
        parent = os.path.dirname(real)  # noqa: PTH120
        if parent == real:
            return False
        real = parent
    return True


def refused(path: str | Path, why: str) -> PermanentError:
    """The error for a path that is not allowed: path, roots and setting."""
    allowed = sorted(roots())
    shown = ", ".join(allowed[:MAX_SHOWN_ROOTS]) or "none"
    if len(allowed) > MAX_SHOWN_ROOTS:
        shown += f" and {len(allowed) - MAX_SHOWN_ROOTS:,} more"
    is_set = os.environ.get(ROOTS_VARIABLE, "").strip()
    setting = f"{ROOTS_VARIABLE} names {'them' if is_set else 'others; it is not set'}"
    return PermanentError(f"{path}{why}: {shown} ({setting})", type="not_allowed")


# --- folders -----------------------------------------------------------------------------------


class Folder:
    """A folder by its handle: its path may lead elsewhere later, its handle does not.

    Names are names of files directly in the folder. A link is never followed; it can be replaced
    and deleted.
    """

    def __init__(self, handle: int, path: Path) -> None:
        self._handle = handle
        self.path = path

    def close(self) -> None:
        os.close(self._handle)

    def open(self, name: str, flags: int) -> int:
        """The handle of the file. A new file is private to this user, whatever the umask."""
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
        """Make the changes in this folder survive a power cut."""
        _sync(self._handle)

    def make_file(self, name: str) -> None:
        """Create an empty private file, unless the file exists.

        On Linux the file is not opened: closing it would drop the locks that this process holds
        on it through another handle, as SQLite does.
        """
        with suppress(FileExistsError):
            if hasattr(os, "O_PATH"):  # Linux; elsewhere only root may use mknod
                os.mknod(_checked(name), FILE_MODE | stat.S_IFREG, dir_fd=self._handle)
            else:
                os.close(self.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL))


@contextmanager
def opened_folder(path: str | Path, *, create: bool = False) -> Iterator[Folder]:
    """The folder, if it is in a root. Raises `PermanentError` if not, `OSError` as `open` does.

    With `create`, the folder and its parents are created if missing, private to this user.
    """
    folder = open_folder(path, create=create)
    try:
        yield folder
    finally:
        folder.close()


def open_folder(path: str | Path, *, create: bool = False) -> Folder:
    """As `opened_folder`, but the caller closes it."""
    if plain := _plainly_within(path):
        with suppress(_LinkFound):
            return _entered(plain, create=create)
    try:
        return _entered(confined(path), create=create)
    except _LinkFound:
        raise _swapped(path) from None


@contextmanager
def opened_file(path: str | Path) -> Iterator[int]:
    """The handle of a file for reading, if the resolved path is in a root.

    Raises as `opened_folder`. Does not wait for the writer of a pipe.
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
    """Whether the path is a regular file, not a link. Raises `PermanentError` outside the roots."""
    path = Path(path)
    try:
        with opened_folder(path.parent) as folder:
            return stat.S_ISREG(folder.stat(path.name).st_mode)
    except OSError:
        return False


class _LinkFound(Exception):
    """A path that should have no links has one."""


def _plainly_within(path: str | Path) -> Path | None:
    """The path if it is in a root as written; opening it step by step then finds any link.

    Resolving first would double the cost, so only paths with links are resolved.
    """
    text = str(path)
    is_plain = text.startswith("/") and os.path.normpath(text) == text and _can_be_a_path(text)
    return Path(text) if is_plain and _is_within(text) else None


def _opened(real: Path) -> int:
    if not real.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(real))
    folder = _entered(real.parent, create=False)  # the parent need not be in a root
    try:
        return folder.open(real.name, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _LinkFound from None
        raise
    finally:
        folder.close()


def _entered(real: Path, *, create: bool) -> Folder:
    """Open the folder step by step from `/`. Raises `_LinkFound`, `OSError`."""
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
    with suppress(FileExistsError):  # another process created it
        os.mkdir(name, FOLDER_MODE, dir_fd=handle)
        _sync(handle)
    return _step(handle, name, create=False)


def _is_link(handle: int, name: str) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=handle, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _swapped(path: str | Path) -> OSError | PermanentError:
    """The error for a link that appeared after the check, or for links that form a circle."""
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
    """Whether the text has no zero byte and no lone surrogate."""
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


# --- results -----------------------------------------------------------------------------------

DEFAULT_OUT = "documents"
UNKNOWN_DAY = "unknown"

_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNWRITABLE = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP),
    *(errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG),
)


def default_out() -> Path:
    """The folder of results, if the caller names none."""
    return Path(os.environ.get(OUT_VARIABLE, "").strip() or DEFAULT_OUT).absolute()


def checked_id(document_id: object) -> str:
    """The id, if it is a safe file name. Raises `PermanentError`."""
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
    """Partitioned by the day of the document, not by today: a rerun writes the same file."""
    day, kind = file_name(day or UNKNOWN_DAY), file_name(kind)
    return out / "parquet" / f"day={day}" / f"type={kind}" / f"{document_id}.parquet"


def is_result(kind: str, out: Path, document_id: str, path: str | Path) -> bool:
    """Whether `parquet_path` or `json_path` could give this path for this document."""
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

    A review deletes the file in an earlier partition; it must never delete another file.
    """
    if is_result(kind, out, document_id, path):
        return Path(path)
    partition = "" if kind == "json" else "day=…/type=…/"
    place = out / kind / f"{partition}{document_id}.{kind}"
    raise refused(
        path, f" is not where '{document_id}' is saved as {kind}, {place}; documents may use"
    )


def write_atomically(path: Path, content: bytes) -> bool:
    """Write the file, whole and durable; False if it already has this content.

    Safe to repeat and to kill: at any moment the path has the old file or the new one.
    Raises `RetryableError` if the disk is full, `PermanentError` if the path is not writable.
    """
    try:
        with opened_folder(path.parent, create=True) as folder:
            if _holds(folder, path.name, content):
                _sweep(folder, path.name)
                # Its writer may have been killed before it synced the folder.
                folder.sync()
                return False
            _replace(folder, path.name, content)
    except OSError as error:
        raise explained(error, path) from error
    return True


def read_file(path: Path) -> bytes:
    """The content of a file that was written here; a link is not followed. Raises `OSError`."""
    with opened_folder(path.parent) as folder:
        file = folder.open(path.name, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(file, "rb") as opened:
        return opened.read()


def saved(path: Path, content: bytes) -> dict[str, Any]:
    """`write_atomically`; returns the output of the step."""
    write_atomically(path, content)
    return {"path": str(path), "bytes": len(content), "sha256": sha256(content).hexdigest()}


def remove(path: Path) -> bool:
    """Delete a file durably; False if there was none."""
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
    """The error as a Dovetail error, with a remedy."""
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
        if error.errno in (errno.ENOENT, errno.ELOOP):  # a link gets replaced, not followed
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
            folder.unlink(temporary)  # safe: this process still holds the lock
        raise
    finally:
        os.close(handle)
    folder.sync()


def _sweep(folder: Folder, name: str) -> None:
    """Delete the temporary file that a killed process left."""
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
    """Open and lock the temporary file; closing it releases the lock."""
    while True:
        handle = folder.open(temporary, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(handle), folder.stat(temporary)):
                return handle
        except FileNotFoundError:
            pass  # the previous writer renamed it while this one waited
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


# --- documents in folders ----------------------------------------------------------------------

# `os.path` instead of `Path.resolve`, `exists` and so on: these raise for links in a circle, names
# that are too long, unknown homes, and files in a folder without permission.
# ruff: noqa: PTH110, PTH111, PTH112, PTH113, PTH114


TEXTS = frozenset({".pdf", ".docx", ".txt", ".text", ".html", ".htm", ".xhtml"})
IMAGES = frozenset({".png", ".jpg", ".jpeg", ".tif", ".tiff"})
WRITTEN = ("json", "parquet")
"""The folders that results are written to."""
MAX_SLUG_LENGTH = 100
ID_DIGITS = 10

_MAGIC = re.compile(r"[*?[]")


class NoDocuments(DovetailError):
    """The paths lead to no document."""

    type = "invalid_input"


@dataclass
class Findings:
    """What the paths led to."""

    files: list[str] = field(default_factory=list)
    """Absolute, without symbolic links, each once; ordered by given path, then by name."""
    others: int = 0
    """How many files in folders were skipped because of their kind."""
    images: int = 0
    """How many images in folders were skipped because images were not wanted."""
    named: list[Path] = field(default_factory=list)
    """The given files and folders, resolved; for a pattern, the folder it starts in."""
    _seen: set[Path] = field(default_factory=set)

    def take(self, path: Path) -> None:
        if path not in self._seen:
            self._seen.add(path)
            self.files.append(str(path))


def find_documents(paths: Sequence[str], out: Path, *, images: bool = True) -> Findings:
    """The documents behind files, folders and patterns; nothing of `out` or of hidden folders.

    A file that is named itself is taken whatever its extension. Raises `NoDocuments`.
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
    """The path itself, or the matches of a pattern that the shell did not expand."""
    if "\0" in given:
        raise NoDocuments(f"{given!r} is no path")
    path = os.path.expanduser(given)
    if os.path.exists(path):
        named.append(_real(path))
        yield named[-1]
    elif _MAGIC.search(given):
        # Not Path.glob, which also matches hidden files.
        found = glob.iglob(path, recursive=True)  # noqa: PTH207
        matches = sorted(match for match in found if os.path.exists(match))  # no broken links
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
    """Every regular file below, sorted. Links to folders are not followed."""

    def complain(error: OSError) -> None:
        raise NoDocuments(f"{error.filename} cannot be read: {error.strerror}") from None

    for name, folders, files in os.walk(folder, onerror=complain):
        here = Path(name)
        # If the caller names the folder of results, only the other files in it are documents.
        ours = WRITTEN if here == kept_out else ()
        folders[:] = sorted(
            one for one in folders if one[0] != "." and one not in ours and here / one != kept_out
        )
        for path in (here / one for one in sorted(files) if one[0] != "."):
            real = _real(path) if os.path.islink(path) else path
            if os.path.isfile(real):  # not a broken link
                yield real


def document_id(path: str) -> str:
    """A safe file name, always the same for an absolute path: `invoice-7-3f9a0c11d2`."""
    letters = unicodedata.normalize("NFKD", Path(path).stem).encode("ascii", "ignore").decode()
    slug = re.sub(r"[^A-Za-z0-9._]+", "-", letters).strip("-._").lower()[:MAX_SLUG_LENGTH]
    digits = sha256(os.fsencode(path)).hexdigest()[:ID_DIGITS]
    return f"{slug or 'document'}-{digits}"


def name_problem(path: str) -> dict[str, str] | None:
    """Why no run can have this path as a param, or None: params are text."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return {"type": "bad_name", "message": "the path is not UTF-8; rename it"}
    return None


@dataclass(frozen=True, slots=True)
class SourceDocument:
    """A file as it is now, and the results of earlier runs."""

    id: str
    path: str
    sha256: str
    """Empty for a file that is too large or not readable."""
    review: Review | None
    is_done: bool
    """This content at this path was extracted, saved and has a review."""
    is_known: bool
    """This content was extracted before, at any path: extracting it again makes no call."""


def source_document(
    path: str, out: Path, reviews: Reviews, extractor: str, *, by_pages: bool = False
) -> SourceDocument:
    """The file and its earlier results. An empty `extractor` matches any that extracts documents
    whole, or any that extracts them by pages."""
    from dovetail.documents.extraction import BY_PAGES, cached

    name, sha256 = document_id(path), _content_hash(path)
    review = reviews.get(name)
    same_way = review is not None and review.extractor.endswith(BY_PAGES) == by_pages
    is_done = same_way and _covers(review, path, sha256, extractor)
    is_known = is_done or bool(sha256 and extractor and cached(sha256, out, extractor))
    return SourceDocument(name, path, sha256, review, is_done, is_known)


def _content_hash(path: str) -> str:
    """Empty if the file cannot be read: the run that reads it reports the error."""
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
    except PermanentError:  # the paths of a row are not trusted
        return False

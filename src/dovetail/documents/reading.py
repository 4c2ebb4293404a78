"""The bytes of a file become text, whatever its name.

The content decides the kind; a wrong extension gives a warning. Text files are read here. Every
other format is parsed by `formats.py` in a child process, of which a few are kept. A parser that
crashes or hangs costs its own document only.
"""

from __future__ import annotations

import atexit
import codecs
import errno
import math
import os
import queue
import re
import select
import signal
import stat
import subprocess
import sys
import time
import unicodedata
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import orjson

from dovetail import PermanentError, RetryableError
from dovetail.documents.files import opened_file
from dovetail.documents.formats import COUNT, MAX_MEMORY, MAX_PAGES

# --- readers -----------------------------------------------------------------------------------

MAX_READERS = 2
READING_SECONDS = 60.0
START_SECONDS = 10.0
MAX_READINGS = 2
"""How many readers may die on one document."""
FULL_MEMORY_SHARE = 0.7
"""A reader that died above this share of its memory ran out of memory."""

# The variables that a reader gets: no key and no password for a hostile file to find.
_READER_ENVIRONMENT = frozenset(
    {
        *("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "TESSDATA_PREFIX"),
        *("LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "HOME"),
    }
)
# A document that crashes the reader would crash it again. SIGKILL may come from outside.
_CRASHES = {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGABRT,
    signal.SIGILL,
    signal.SIGFPE,
    signal.SIGTRAP,
}


class _Reader:
    """One process of `formats.py`."""

    def __init__(self) -> None:
        # By path, not by module name: it imports nothing of the package. `-P`: the modules beside
        # it must not hide Python's own. A new session: Ctrl-C must not reach it.
        self.process = subprocess.Popen(  # noqa: S603  (our own file)
            [sys.executable, "-P", str(Path(__file__).with_name("formats.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name in _READER_ENVIRONMENT},
        )
        self.peak_bytes = 0
        """Its peak memory, known after its end."""
        self._requests = cast("IO[bytes]", self.process.stdin)
        self._answers = cast("IO[bytes]", self.process.stdout)

    def ask(self, kind: str, data: bytes, seconds: float) -> dict[str, Any] | None:
        """Its answer, or None after `seconds`. Raises `EOFError` if it died."""
        try:
            self._requests.write(f"{kind} {len(data)}\n".encode())
            self._requests.write(data)
            self._requests.flush()
        except (BrokenPipeError, ValueError):
            raise EOFError from None
        until = time.monotonic() + seconds
        ready = select.poll()
        ready.register(self._answers, select.POLLIN)
        answer, length = bytearray(), -1
        while length < 0 or len(answer) < length:
            left = until - time.monotonic()
            if left <= 0 or not ready.poll(1000 * left):
                return None
            part = os.read(self._answers.fileno(), 1 << 20)
            if not part:
                raise EOFError
            answer += part
            if length < 0 and b"\n" in answer:
                head, _, rest = answer.partition(b"\n")
                answer, length = rest, int(head)
        found: dict[str, Any] = orjson.loads(answer)
        return found

    def end(self) -> int:
        """Kill it and its children; returns its exit code."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pipe in (self._requests, self._answers):
            with suppress(OSError):
                pipe.close()
        if self.process.returncode is None:
            # `wait` does not report memory.
            with suppress(ChildProcessError):
                _, status, used = os.wait4(self.process.pid, 0)
                self.process.returncode = os.waitstatus_to_exitcode(status)
                self.peak_bytes = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return self.process.wait()


_readers: queue.LifoQueue[_Reader | None] = queue.LifoQueue()


def _start_anew() -> None:
    """Reset the pool, with no reader started: a forked process must not share its parent's."""
    global _readers
    _readers = queue.LifoQueue()
    for _ in range(MAX_READERS):
        _readers.put(None)


def start_readers() -> None:
    """Start the readers that are not started and not in use, and wait until they answer."""
    free = []
    with suppress(queue.Empty):
        while True:
            free.append(_readers.get_nowait())
    started = [reader or _Reader() for reader in free]  # start all, then wait
    for reader in started:
        answer = None
        with suppress(EOFError):
            answer = reader.ask("html", b"<p>ready</p>", START_SECONDS)
        if answer is None:  # the first document reports why
            reader.end()
        _readers.put(reader if answer is not None else None)


def _end_readers() -> None:
    with suppress(queue.Empty):
        while True:
            reader = _readers.get_nowait()
            if reader is not None:
                reader.end()


_start_anew()
os.register_at_fork(after_in_child=_start_anew)
atexit.register(_end_readers)


def ask_reader(kind: str, data: bytes, path: Path) -> dict[str, Any]:
    """The answer of `formats.py`. Raises `PermanentError` with the type of its error."""
    home = _readers
    reader = home.get()
    try:
        answer, reader = _answer(reader, kind, data, path)
    except BaseException:
        home.put(None)
        raise
    home.put(reader)
    if "error" not in answer:
        return answer
    if answer["error"] == "missing_package":
        raise PermanentError(
            f"the package '{answer['message']}' is not installed: "
            "pip install 'dovetail[documents]'",
            type="missing_package",
        )
    raise PermanentError(f"{path.name}: {answer['message']}", type=answer["error"])


def _answer(
    reader: _Reader | None, kind: str, data: bytes, path: Path
) -> tuple[dict[str, Any], _Reader]:
    """The answer of a reader, and the reader for the next document.

    A reader may have been killed from outside, so the document gets a second one. There is no
    third and no retry of the node: each would take as long again.
    """
    if reader is not None and reader.process.poll() is not None:
        reader.end()  # it died while idle, not because of this document
        reader = None
    ends: list[str] = []
    while True:
        reader = reader or _Reader()
        try:
            answer = reader.ask(kind, data, READING_SECONDS)
        except EOFError:
            ends.append(_how_it_ended(reader.end(), reader.peak_bytes, kind, path))
            if len(ends) == MAX_READINGS:
                raise PermanentError(
                    f"{path.name}: {MAX_READINGS} processes that read it came to an end, "
                    f"{' and '.join(ends)}; it is not tried again. Where a reader gets the memory "
                    "that it needs, the document may be read",
                    type="reader_lost",
                ) from None
            reader = None
        except BaseException:
            reader.end()
            raise
        else:
            break
    if answer is None:
        reader.end()
        raise PermanentError(
            f"{path.name}: it could not be read within {READING_SECONDS:g} s", type="too_large"
        )
    return answer, reader


def _how_it_ended(code: int, peak_bytes: int, kind: str, path: Path) -> str:
    """How a reader ended. Raises `PermanentError` if the document is certainly the cause."""
    if peak_bytes > FULL_MEMORY_SHARE * MAX_MEMORY:
        raise PermanentError(
            f"{path.name}: reading it takes more than the {MAX_MEMORY / 1e9:g} GB of memory that "
            "a reader may have",
            type="too_large",
        ) from None
    if -code in _CRASHES:
        raise PermanentError(
            f"{path.name}: the reader of {kind.partition(':')[0]} crashes on it "
            f"({signal.Signals(-code).name})",
            type="corrupt",
        ) from None
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


# --- files -------------------------------------------------------------------------------------

MAX_TEXT_LENGTH = 200_000
MAX_BYTES = 50_000_000
MAX_BYTES_SETTING = "DOVETAIL_DOCUMENTS_MAX_BYTES"
MAX_PAGES_SETTING = "DOVETAIL_DOCUMENTS_MAX_PAGES"
MAX_ALLOWED_PAGES = 10_000
"""The largest value of the setting: `split` returns the numbers of the pages as one output."""

_NOT_OPENED = {
    errno.ENOENT: ("not_found", "there is no such file"),
    errno.ENOTDIR: ("not_found", "there is no such file"),
    errno.ENAMETOOLONG: ("not_found", "no file can have so long a name"),
    errno.ELOOP: ("not_found", "its links lead in a circle"),
    errno.EACCES: ("not_readable", "this process may not read it; check owner and mode"),
    errno.EPERM: ("not_readable", "this process may not read it; check owner and mode"),
    errno.ENXIO: ("unsupported", "it is no regular file"),
}
_ENDINGS = {
    "pdf": (".pdf",),
    "docx": (".docx", ".docm", ".dotx"),
    "html": (".html", ".htm", ".xhtml"),
    "txt": (".txt", ".text", ".md", ".csv", ".log", ".eml", ".xml"),
    "png": (".png",),
    "jpeg": (".jpg", ".jpeg"),
    "tiff": (".tif", ".tiff"),
}
_KNOWN_ENDINGS = frozenset(ending for endings in _ENDINGS.values() for ending in endings)
_MAGIC = (
    (b"PK\x03\x04", "docx"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"\xff\xd8\xff", "jpeg"),
    (b"II*\x00", "tiff"),
    (b"MM\x00*", "tiff"),
)
# Known kinds that are not read, so that the error can name a remedy.
_REFUSED = (
    (b"{\\rtf", "an RTF text; save it as DOCX or PDF"),
    (b"GIF8", "a GIF picture; save it as PNG"),
    (b"BM", "a BMP picture; save it as PNG"),
    (b"RIFF", "a WebP picture or a sound; save it as PNG"),
    (b"\x1f\x8b", "compressed by gzip; unpack it first"),
    (b"7z\xbc\xaf", "a 7z archive; unpack it first"),
    (b"Rar!", "a RAR archive; unpack it first"),
)
_OLD_OFFICE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_ENCRYPTED_OFFICE = "EncryptedPackage".encode("utf-16-le")
_MARKS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))
_IS_HTML = re.compile(rb"\s{0,999}<(!doctype\s{1,9}html|html|head|body|table|div|p)[\s>]", re.I)
_IS_XHTML = re.compile(rb"\s{0,999}<(\?xml|!--)", re.I)
_META_CHARSET = re.compile(rb"<meta[^>]{0,200}?charset\s{0,9}=\s{0,9}[\"']?([\w.:-]{1,40})", re.I)
_NOT_TEXT = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b-\u200f\ufeff\ufffe\uffff\ud800-\udfff]"
)
_BLANKS = re.compile("[^\\S\n\t]")
_EMPTY_LINES = re.compile("\n{3,}")


@dataclass(frozen=True, slots=True)
class Reading:
    """The text of a document, with warnings."""

    kind: str
    text: str
    pages: int
    warnings: tuple[str, ...] = ()


def read(path: str | Path) -> Reading:
    """The text of this file. Raises `PermanentError`; its type says why there is none."""
    path = Path(path)
    return parse(load(path), path)


def has_known_ending(path: str | Path) -> bool:
    """Whether the name is that of a document, so that it is found in a folder."""
    return Path(path).suffix.lower() in _KNOWN_ENDINGS


def extension_warning(path: str | Path, kind: str) -> str | None:
    """A warning if the extension does not match the kind."""
    ending = Path(path).suffix.lower()
    if ending not in _KNOWN_ENDINGS or ending in _ENDINGS[kind]:
        return None
    return f"its name ends in {ending}, its content is {kind}; it was read as {kind}"


# --- bytes -------------------------------------------------------------------------------------


def load(path: Path) -> bytes:
    """The bytes of a file. Refuses an empty file, and a too large one before reading it."""
    limit = max_bytes()
    try:
        with opened_file(path) as file:
            data = _all_of(file, path, limit)
    except OSError as error:
        if error.errno in _NOT_OPENED:
            type_, what = _NOT_OPENED[error.errno]
            raise PermanentError(f"{path}: {what}", type=type_) from None
        raise RetryableError(f"{path}: {error.strerror}", type="not_readable") from error
    if len(data) > limit:  # the file has grown meanwhile
        raise _too_large(path, f"more than {limit:,}", limit)
    if not data:
        raise PermanentError(f"{path.name}: the file is empty", type="empty_file")
    return data


def _all_of(file: int, path: Path, limit: int) -> bytes:
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        what = "a folder" if stat.S_ISDIR(found.st_mode) else "no regular file"
        raise PermanentError(f"{path}: it is {what}", type="unsupported")
    if found.st_size > limit:
        raise _too_large(path, f"{found.st_size:,}", limit)
    with os.fdopen(file, "rb", closefd=False) as opened:
        return opened.read(limit + 1)


def max_bytes() -> int:
    """How large a document may be."""
    return _limit(MAX_BYTES_SETTING, "bytes", MAX_BYTES)


def max_pages() -> int:
    """How many pages a PDF may have that is extracted page by page."""
    return _limit(MAX_PAGES_SETTING, "pages", MAX_PAGES, MAX_ALLOWED_PAGES)


def _limit(setting: str, unit: str, default: int, most: float = math.inf) -> int:
    given = os.environ.get(setting, "").strip()
    if not given:
        return default
    if not given.isascii() or not given.isdigit() or not 1 <= int(given) <= most:
        bound = "" if most == math.inf else f" from 1 to {most}"
        raise PermanentError(
            f"{setting} must be a number of {unit}{bound}, as in {default}", type="invalid_config"
        )
    return int(given)


def _too_large(path: Path, size: str, limit: int) -> PermanentError:
    return PermanentError(
        f"{path.name}: {size} bytes, at most {limit:,} are read; {MAX_BYTES_SETTING} raises that",
        type="too_large",
    )


# --- text --------------------------------------------------------------------------------------


def split(data: bytes, path: Path) -> tuple[str, int]:
    """The kind of a document, and the number of its pages. A document that is no PDF has one page.

    Raises `PermanentError` if a PDF has more pages than `max_pages`.
    """
    kind = _kind(data, path)
    if kind != "pdf":
        return kind, 1
    pages, limit = int(ask_reader(f"pdf:{COUNT}", data, path)["pages"]), max_pages()
    if pages > limit:
        raise PermanentError(
            f"{path.name}: {pages:,} pages, at most {limit:,} are extracted one by one; "
            f"{MAX_PAGES_SETTING} raises that, up to {MAX_ALLOWED_PAGES:,}",
            type="too_large",
        )
    return kind, pages


def parse(data: bytes, path: Path, page: int | None = None) -> Reading:
    """The text in these bytes. `page`, from 1: of a PDF only the text of this page.

    The path is used in messages only.
    """
    kind = _kind(data, path)
    pages, warnings = 1, []
    if kind != "pdf":
        page = None
    if page is not None:
        path = path.with_name(f"{path.name}, page {page}")
    if kind == "txt":
        text = _decoded(data)
    else:
        if kind == "html":
            data = _decoded(data).encode("utf-8", "replace")
        answer = ask_reader(kind if page is None else f"pdf:{page}", data, path)
        text, pages, warnings = answer["text"], answer["pages"], answer["warnings"]
    text = _clean(text)
    if not text:
        raise PermanentError(f"{path.name}: there is no text in it", type="empty_file")
    if len(text) > MAX_TEXT_LENGTH:
        warnings = [*warnings, f"only its first {MAX_TEXT_LENGTH:,} characters were looked at"]
        text = text[:MAX_TEXT_LENGTH]
    return Reading(kind, text, pages, tuple(warnings))


def _kind(data: bytes, path: Path) -> str:
    for magic, kind in _MAGIC:
        if data.startswith(magic):
            return kind
    if b"%PDF-" in data[:1024]:  # some have bytes before it, and every viewer opens them
        return "pdf"
    if data.startswith(_OLD_OFFICE):
        if _ENCRYPTED_OFFICE in data:
            raise PermanentError(
                f"{path.name}: the document asks for a password; save it without",
                type="encrypted",
            )
        raise _unsupported(path, "an Office document of before 2007; save it as DOCX or PDF")
    for magic, what in _REFUSED:
        if data.startswith(magic) and not _is_text(data):
            raise _unsupported(path, what)
    if data.startswith(b"{\\rtf"):
        raise _unsupported(path, _REFUSED[0][1])
    if not _is_text(data):
        claimed = next((k for k, ends in _ENDINGS.items() if path.suffix.lower() in ends), None)
        if claimed is not None:
            raise PermanentError(
                f"{path.name}: its content is not {claimed}, nor anything else that is known; "
                "the file is damaged",
                type="corrupt",
            )
        raise _unsupported(path, "of no kind that is known: PDF, DOCX, HTML, TXT, PNG, JPEG, TIFF")
    head = data[:4096].replace(b"\0", b"") if _mark(data)[1].startswith("utf-16") else data[:4096]
    head = head.removeprefix(b"\xef\xbb\xbf").removeprefix(b"\xff\xfe").removeprefix(b"\xfe\xff")
    if _IS_HTML.match(head) or (_IS_XHTML.match(head) and b"<html" in head.lower()):
        return "html"
    return "txt"


def _unsupported(path: Path, what: str) -> PermanentError:
    return PermanentError(f"{path.name}: it is {what}", type="unsupported")


def _is_text(data: bytes) -> bool:
    if _mark(data)[1].startswith("utf-16"):
        return True
    head = data[:65536]
    if b"\0" in head:
        return False
    controls = sum(map(head.count, (b"\x01", b"\x02", b"\x03", b"\x04", b"\x05", b"\x06", b"\x0e")))
    return controls * 200 <= len(head)


def _mark(data: bytes) -> tuple[bytes, str]:
    return next((pair for pair in _MARKS if data.startswith(pair[0])), (b"", ""))


def _decoded(data: bytes) -> str:
    mark, encoding = _mark(data)
    if not encoding and (said := _META_CHARSET.search(data[:4096])):
        encoding = _charset(said[1].decode("ascii", "replace"))
    if encoding:
        return data[len(mark) :].decode(encoding, "replace")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("cp1252", "replace")


def _charset(name: str) -> str:
    """The encoding, or "" if it is not for text or is slow to decode."""
    try:
        info = codecs.lookup(name)
    except (LookupError, ValueError):
        return ""
    is_text = getattr(info, "_is_text_encoding", False)
    slow = info.name in ("idna", "punycode", "unicode_escape", "raw_unicode_escape", "utf-7")
    # A declaration that is readable as plain bytes cannot be in UTF-16 or UTF-32.
    return "" if slow or not is_text or info.name.startswith(("utf-16", "utf-32")) else info.name


def _clean(text: str) -> str:
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\u2028", "\n")
    text = _NOT_TEXT.sub("", unicodedata.normalize("NFC", text[: 2 * MAX_TEXT_LENGTH]))
    text = _BLANKS.sub(" ", text)
    text = "\n".join(line.rstrip() for line in text.split("\n"))
    return _EMPTY_LINES.sub("\n\n", text).strip("\n")

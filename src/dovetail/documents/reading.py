"""A file's bytes become text, whatever the file is called and whoever made it.

What kind a document is, its content says; of a wrong ending people are warned. Text files are
read here, every other format by `readers.py`. It must not know what is looked for in the text.
"""

from __future__ import annotations

import codecs
import errno
import os
import re
import stat
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from dovetail import PermanentError, RetryableError
from dovetail.documents.confinement import opened_file
from dovetail.documents.readers import ask_reader

LONGEST_TEXT = 200_000
MAX_BYTES = 50_000_000
MAX_BYTES_SETTING = "DOVETAIL_DOCUMENTS_MAX_BYTES"

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
# Known, so that people are told what would work instead of that it is garbage.
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
    """The text of a document and what is to be said about getting it."""

    kind: str
    text: str
    pages: int
    warnings: tuple[str, ...] = ()


def read(path: str | Path) -> Reading:
    """The text of this file. Raises `PermanentError` with the type that says why there is none."""
    path = Path(path)
    return parse(load(path), path)


def extension_warning(path: str | Path, kind: str) -> str | None:
    """What to say of a file whose name claims another kind than it is."""
    ending = Path(path).suffix.lower()
    if ending not in _KNOWN_ENDINGS or ending in _ENDINGS[kind]:
        return None
    return f"its name ends in {ending}, its content is {kind}; it was read as {kind}"


# --- bytes -------------------------------------------------------------------------------------


def load(path: Path) -> bytes:
    """The bytes of a file that is neither empty nor too large, which is known before it is read."""
    limit = max_bytes()
    try:
        with opened_file(path) as file:
            data = _all_of(file, path, limit)
    except OSError as error:
        if error.errno in _NOT_OPENED:
            type_, what = _NOT_OPENED[error.errno]
            raise PermanentError(f"{path}: {what}", type=type_) from None
        raise RetryableError(f"{path}: {error.strerror}", type="not_readable") from error
    if len(data) > limit:  # it has grown meanwhile
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
    given = os.environ.get(MAX_BYTES_SETTING, "").strip()
    if not given:
        return MAX_BYTES
    if not given.isascii() or not given.isdigit() or int(given) < 1:
        raise PermanentError(
            f"{MAX_BYTES_SETTING} must be a number of bytes, as in {MAX_BYTES}",
            type="invalid_config",
        )
    return int(given)


def _too_large(path: Path, size: str, limit: int) -> PermanentError:
    return PermanentError(
        f"{path.name}: {size} bytes, at most {limit:,} are read; {MAX_BYTES_SETTING} raises that",
        type="too_large",
    )


# --- text --------------------------------------------------------------------------------------


def parse(data: bytes, path: Path) -> Reading:
    """The text in these bytes; the path is for what is told of it, not for what it is."""
    kind = _kind(data, path)
    pages, warnings = 1, []
    if kind == "txt":
        text = _decoded(data)
    else:
        if kind == "html":
            data = _decoded(data).encode("utf-8", "replace")
        answer = ask_reader(kind, data, path)
        text, pages, warnings = answer["text"], answer["pages"], answer["warnings"]
    text = _clean(text)
    if not text:
        raise PermanentError(f"{path.name}: there is no text in it", type="empty_file")
    if len(text) > LONGEST_TEXT:
        warnings = [*warnings, f"only its first {LONGEST_TEXT:,} characters were looked at"]
        text = text[:LONGEST_TEXT]
    return Reading(kind, text, pages, tuple(warnings))


def _kind(data: bytes, path: Path) -> str:
    for magic, kind in _MAGIC:
        if data.startswith(magic):
            return kind
    if b"%PDF-" in data[:1024]:  # some have something in front of it, and every viewer opens them
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
    """The name if it is one of text; Python also knows some that are none, or that take long."""
    try:
        info = codecs.lookup(name)
    except (LookupError, ValueError):
        return ""
    is_text = getattr(info, "_is_text_encoding", False)
    slow = info.name in ("idna", "punycode", "unicode_escape", "raw_unicode_escape", "utf-7")
    # What calls itself UTF-16 in plain bytes, and could be read so far, is not.
    return "" if slow or not is_text or info.name.startswith(("utf-16", "utf-32")) else info.name


def _clean(text: str) -> str:
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\u2028", "\n")
    text = _NOT_TEXT.sub("", unicodedata.normalize("NFC", text[: 2 * LONGEST_TEXT]))
    text = _BLANKS.sub(" ", text)
    text = "\n".join(line.rstrip() for line in text.split("\n"))
    return _EMPTY_LINES.sub("\n\n", text).strip("\n")

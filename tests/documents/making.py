"""Makes documents of every kind that is read: whole ones, and broken, locked and huge ones.

PDF is written by hand, so that each byte of it is ours to choose; DOCX by python-docx.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

A4 = (595, 842)
LEFT, RIGHT = 56, 539

# Of Helvetica, in thousandths; enough to put numbers flush right.
_WIDTHS = {**dict.fromkeys("0123456789€$£", 556), **dict.fromkeys(".,: ", 278), "-": 333, "%": 889}
_PADDING = bytes.fromhex("28bf4e5e4e758a4164004e56fffa01082e2e00b6d0683e802f0ca9fe6453697a")


@dataclass(frozen=True)
class Mark:
    """A piece of text on a page. `flush` puts its right end at x."""

    x: float
    y: float
    text: str
    size: float = 10
    bold: bool = False
    flush: bool = False


def row(y: float, cells: Sequence[tuple[float, str]], *, bold: bool = False) -> list[Mark]:
    """Cells of a table: the first flush left, those after it flush right at their x."""
    return [Mark(x, y, text, bold=bold, flush=i > 0) for i, (x, text) in enumerate(cells)]


def paragraph(
    y: float, text: str, *, x: float = LEFT, size: float = 10, wide: int = 90
) -> list[Mark]:
    """Words in lines of so many characters, downwards from y."""
    lines: list[str] = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= wide:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return [Mark(x, y - number * (size + 4), line, size) for number, line in enumerate(lines)]


DRAWING = "9 w 0 0 m 99 99 l S"
"""A page with a line and no text: a picture to be read by OCR."""


def pdf(
    pages: Iterable[Iterable[Mark] | str], *, password: str | None = None, compressed: bool = False
) -> bytes:
    """A PDF 1.4 of these pages; with a password, one that cannot be opened without it.

    A page as text is what draws it.
    """
    contents = [page.encode() if isinstance(page, str) else _drawn(page) for page in pages]
    count = len(contents)
    identity = hashlib.md5(b"".join(contents), usedforsecurity=False).digest()
    lock = _lock(password, identity) if password is not None else None
    numbers = range(5, 5 + 2 * count, 2)
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Count %d /Kids [%s] >>"
        % (count, b" ".join(b"%d 0 R" % number for number in numbers)),
        *(
            b"<< /Type /Font /Subtype /Type1 /BaseFont /%s /Encoding /WinAnsiEncoding >>" % name
            for name in (b"Helvetica", b"Helvetica-Bold")
        ),
    ]
    for number, content in zip(numbers, contents, strict=True):
        kind = b""
        if compressed:
            content, kind = zlib.compress(content), b" /Filter /FlateDecode"
        if lock is not None:
            content = _rc4(_object_key(lock[0], number + 1), content)
        objects += [
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 %d %d] /Contents %d 0 R "
            b"/Resources << /Font << /F1 3 0 R /F2 4 0 R >> >> >>" % (*A4, number + 1),
            b"<< /Length %d%s >>\nstream\n%s\nendstream" % (len(content), kind, content),
        ]
    return _file(objects, identity, lock)


def _drawn(marks: Iterable[Mark]) -> bytes:
    lines = [b"BT"]
    for mark in marks:
        left = mark.x - _width(mark.text) * mark.size / 1000 if mark.flush else mark.x
        text = mark.text.encode("cp1252")
        for sign in (b"\\", b"(", b")"):
            text = text.replace(sign, b"\\" + sign)
        place = f"/F{1 + mark.bold} {mark.size:g} Tf 1 0 0 1 {left:.2f} {mark.y:.2f} Tm"
        lines.append(place.encode() + b" (" + text + b") Tj")
    return b"\n".join([*lines, b"ET"])


def _width(text: str) -> float:
    return sum(_WIDTHS.get(sign, 600) for sign in text)


def _file(objects: list[bytes], identity: bytes, lock: tuple[bytes, bytes, bytes] | None) -> bytes:
    made = bytearray(b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n")
    places = []
    trailer = b"/ID [<%s> <%s>]" % (identity.hex().encode(), identity.hex().encode())
    if lock is not None:
        _, owner, user = lock
        # The dictionary itself is never encrypted: a reader of the file needs it first.
        objects = [
            *objects,
            b"<< /Filter /Standard /V 1 /R 2 /P -4 /O <%s> /U <%s> >>"
            % (owner.hex().encode(), user.hex().encode()),
        ]
        trailer += b" /Encrypt %d 0 R" % len(objects)
    for number, content in enumerate(objects, 1):
        places.append(len(made))
        made += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    start = len(made)
    made += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    for place in places:
        made += b"%010d 00000 n \n" % place
    made += b"trailer\n<< /Size %d /Root 1 0 R %s >>\n" % (len(objects) + 1, trailer)
    return bytes(made + b"startxref\n%d\n%%%%EOF\n" % start)


# --- the standard lock of PDF 1.4, 40 bits -----------------------------------------------------


def _lock(password: str, identity: bytes) -> tuple[bytes, bytes, bytes]:
    """The key of the file, and what proves the owner's and the user's password."""
    padded = (password.encode("latin-1") + _PADDING)[:32]
    owner = _rc4(_md5(padded)[:5], padded)
    key = _md5(padded + owner + struct.pack("<i", -4) + identity)[:5]
    return key, owner, _rc4(key, _PADDING)


def _object_key(key: bytes, number: int) -> bytes:
    return _md5(key + struct.pack("<I", number)[:3] + b"\0\0")[:10]


def _md5(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()


def _rc4(key: bytes, data: bytes) -> bytes:
    box = list(range(256))
    j = 0
    for i in range(256):
        j = (j + box[i] + key[i % len(key)]) % 256
        box[i], box[j] = box[j], box[i]
    made = bytearray()
    i = j = 0
    for byte in data:
        i = (i + 1) % 256
        j = (j + box[i]) % 256
        box[i], box[j] = box[j], box[i]
        made.append(byte ^ box[(box[i] + box[j]) % 256])
    return bytes(made)


# --- other kinds -------------------------------------------------------------------------------

Block = str | Sequence[Sequence[str]]
"""A paragraph, or the rows of a table."""


def docx(blocks: Iterable[Block], *, header: str = "", footer: str = "") -> bytes:
    """A DOCX that has the same bytes whenever it is made."""
    from docx import Document

    document = Document()
    if header:
        document.sections[0].header.paragraphs[0].text = header
    if footer:
        document.sections[0].footer.paragraphs[0].text = footer
    for block in blocks:
        if isinstance(block, str):
            document.add_paragraph(block)
            continue
        table = document.add_table(rows=len(block), cols=max(map(len, block)))
        for cells, texts in zip(table.rows, block, strict=True):
            for cell, text in zip(cells.cells, texts, strict=False):
                cell.text = text
    made = io.BytesIO()
    document.save(made)
    return _undated(made.getvalue())


def _undated(package: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(package)) as given, zipfile.ZipFile(made, "w") as kept:
        for entry in given.infolist():
            content = given.read(entry)
            if entry.filename.endswith(".jpeg"):  # a picture of python-docx's template
                continue
            if entry.filename == "_rels/.rels":
                content = re.sub(rb"<Relationship [^>]*thumbnail[^>]*/>", b"", content)
            undated = zipfile.ZipInfo(entry.filename)
            undated.compress_type = zipfile.ZIP_DEFLATED
            kept.writestr(undated, content)
    return made.getvalue()


def zip_bomb(unpacked: int) -> bytes:
    """A DOCX by its names, small as a file, that unpacks to so many bytes."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as package:
        package.writestr("[Content_Types].xml", "<Types/>")
        with package.open("word/document.xml", "w") as inside:
            for _ in range(unpacked // 1_000_000):
                inside.write(b" " * 1_000_000)
    return made.getvalue()


def sparse(path: Path, size: int) -> Path:
    """A file of that size which takes no room: nothing but a hole."""
    with path.open("wb") as file:
        file.truncate(size)
    return path


def png(width: int = 1, height: int = 1) -> bytes:
    """A white picture."""

    def chunk(name: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + check

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = (b"\0" + b"\xff" * width) * height
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def nested_forms(depth: int, each: int) -> bytes:
    """A PDF of one page whose forms draw each other: a few kilobytes, `each ** depth` words."""
    draw = b"/F Do " * each
    page = b"<</Type/Page/Parent 2 0 R/Contents 4 0 R/Resources<</XObject<</F 6 0 R>>>>"
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1/MediaBox[0 0 600 800]>>",
        page + b">>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(draw), draw),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    for number in range(depth):
        is_last = number == depth - 1
        text = b"BT /A 12 Tf 50 700 Td (hello) Tj ET" if is_last else draw
        uses = b"<</Font<</A 5 0 R>>>>" if is_last else b"<</XObject<</F %d 0 R>>>>" % (number + 7)
        head = b"<</Type/XObject/Subtype/Form/BBox[0 0 600 800]/Resources %s/Length %d>>"
        objects.append(head % (uses, len(text)) + b"stream\n%s\nendstream" % text)
    made, places = bytearray(b"%PDF-1.4\n"), []
    for number, one in enumerate(objects, 1):
        places.append(len(made))
        made += b"%d 0 obj\n%s\nendobj\n" % (number, one)
    size, start = len(objects) + 1, len(made)
    made += b"xref\n0 %d\n0000000000 65535 f \n" % size
    made += b"".join(b"%010d 00000 n \n" % place for place in places)
    return bytes(made + b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (size, start))


def tesseract(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A program of that name; the real one is no requirement of the tests."""
    program = folder / "tesseract"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

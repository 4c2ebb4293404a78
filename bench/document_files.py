"""Small documents for the bench: invoices as TXT, HTML, PDF and DOCX, each with content of its own.

Made by hand, thousands in a second, so that a bench does not wait for its input. What it must not
know: who reads them.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator
from html import escape
from itertools import cycle
from pathlib import Path

VENDORS = ["Norrland Paper AB", "Kestrel Supplies Ltd", "Hafen Bürobedarf GmbH", "Lumen & Sons"]
GOODS = ["Paper, white", "Ink, black", "Chair", "Lamp", "Shelf", "Cable, 2 m", "Desk", "Pens"]


def lines(number: int) -> list[str]:
    """The text of one invoice; another number, another text."""
    items = []
    total = 0
    for place in range(2 + number % 4):
        quantity, cents = 1 + (number + place) % 7, 250 + 37 * ((number * 13 + place * 101) % 500)
        total += quantity * cents
        what = GOODS[(number + place) % len(GOODS)]
        items.append(f"{what}  {quantity}  {_money(cents)}  {_money(quantity * cents)}")
    day = f"2026-{1 + number % 12:02}-{1 + number % 28:02}"
    return [
        "Invoice",
        f"Vendor: {VENDORS[number % len(VENDORS)]}",
        f"Invoice number: {number:06}",
        f"Date: {day}",
        "",
        "Description  Quantity  Unit price  Amount",
        *items,
        "",
        f"Total: {_money(total)} EUR",
        "Payable within 30 days.",
    ]


def _money(cents: int) -> str:
    return f"{cents // 100}.{cents % 100:02}"


def as_txt(text: list[str]) -> bytes:
    return "\n".join([*text, ""]).encode()


def as_html(text: list[str]) -> bytes:
    body = "\n".join(f"<p>{escape(line)}</p>" for line in text)
    head = '<!doctype html><html><head><meta charset="utf-8"></head>'
    return f"{head}<body>{body}</body></html>".encode()


def as_pdf(text: list[str]) -> bytes:
    """One page of Helvetica."""

    def quoted(line: str) -> bytes:
        safe = line.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)")
        return safe.encode("cp1252")

    drawn = b"\n".join(b"(" + quoted(line) + b") Tj T*" for line in text)
    page = b"BT /F1 11 Tf 60 780 Td 14 TL\n" + drawn + b"\nET"
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Contents 4 0 R"
        b" /Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(page), page),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
    ]
    whole, places = io.BytesIO(), []
    whole.write(b"%PDF-1.4\n")
    for number, content in enumerate(objects, 1):
        places.append(whole.tell())
        whole.write(b"%d 0 obj\n%s\nendobj\n" % (number, content))
    table = whole.tell()
    whole.write(b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1))
    whole.writelines(b"%010d 00000 n \n" % place for place in places)
    whole.write(b"trailer << /Size %d /Root 1 0 R >>\n" % (len(objects) + 1))
    whole.write(b"startxref\n%d\n%%%%EOF\n" % table)
    return whole.getvalue()


WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
PACKAGE = "http://schemas.openxmlformats.org/package/2006"
OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"
MAIN = "application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"
RELATIONS = "application/vnd.openxmlformats-package.relationships+xml"
DOCX_PARTS = {
    "[Content_Types].xml": f'<Types xmlns="{PACKAGE}/content-types">'
    f'<Default Extension="rels" ContentType="{RELATIONS}"/>'
    f'<Override PartName="/word/document.xml" ContentType="{MAIN}"/></Types>',
    "_rels/.rels": f'<Relationships xmlns="{PACKAGE}/relationships">'
    f'<Relationship Id="r1" Type="{OFFICE}" Target="word/document.xml"/></Relationships>',
}


def as_docx(text: list[str]) -> bytes:
    """The least that is one: a document of paragraphs, without styles."""
    body = "".join(
        f'<w:p><w:r><w:t xml:space="preserve">{escape(line)}</w:t></w:r></w:p>' for line in text
    )
    document = f'<w:document xmlns:w="{WORD}"><w:body>{body}</w:body></w:document>'
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, part in {**DOCX_PARTS, "word/document.xml": document}.items():
            archive.writestr(name, f'<?xml version="1.0" encoding="UTF-8"?>\n{part}')
    return whole.getvalue()


KINDS: dict[str, Callable[[list[str]], bytes]] = {
    "txt": as_txt,
    "html": as_html,
    "pdf": as_pdf,
    "docx": as_docx,
}


def make(folder: Path, count: int) -> list[Path]:
    """So many documents, the kinds in turn."""
    folder.mkdir(parents=True)
    return list(_made(folder, count))


def _made(folder: Path, count: int) -> Iterator[Path]:
    for number, kind in zip(range(count), cycle(KINDS), strict=False):
        path = folder / f"{number:06}.{kind}"
        path.write_bytes(KINDS[kind](lines(number)))
        yield path

"""PDF, DOCX, HTML and pictures as text: the one place where foreign formats are parsed.

It runs in a process of its own (`reading.py` starts it, by path), because a parser written in C
can crash or hang, and in a thread it would take the worker with it. Therefore it imports nothing
of Dovetail and bounds its own memory.

A request is a line with kind and length, then the bytes. The kind `pdf:7` asks for page 7 of a PDF
only, and `pdf:count` only for the number of its pages. An answer is a line with its length, then
JSON. The process ends when the caller closes the pipe.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any, BinaryIO

MAX_CHARACTERS = 400_000
"""Twice what `reading.py` keeps."""
MAX_PAGES = 300
COUNT = "count"
"""In the kind of a request, in place of a page: only the number of pages."""
MAX_OCR_PAGES = 10
OCR_SECONDS = 60
OCR_DOTS_PER_INCH = 200
MAX_PIXELS = 40_000_000
MAX_UNPACKED = 100_000_000
MAX_MEMORY = 2_000_000_000

_PASSWORD = 4  # FPDF_ERR_PASSWORD
_NO_TEXTS = {"xl/workbook.xml": "a spreadsheet", "ppt/presentation.xml": "a presentation"}
_BODY = re.compile(r"word/document\d*\.xml")
_HEADER = re.compile(r"word/header\d*\.xml")
_FOOTER = re.compile(r"word/footer\d*\.xml")
# fmt: off
_SILENT = {"script", "style", "template", "noscript", "head", "svg", "select", "textarea"}
_BLOCKS = {
    "address", "article", "aside", "blockquote", "body", "caption", "center", "dd", "div", "dl",
    "dt", "fieldset", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header",
    "hr", "li", "main", "nav", "ol", "p", "pre", "section", "table", "tbody", "tfoot", "thead",
    "tr", "ul",
}
# fmt: on


class UnreadableDocument(Exception):
    """A document without text; `type` is the error type of its node."""

    def __init__(self, type: str, message: str) -> None:  # noqa: A002
        super().__init__(message)
        self.type = type


def parse(kind: str, data: bytes) -> dict[str, Any]:
    """Text, pages and warnings. Raises `UnreadableDocument`."""
    warnings: list[str] = []
    kind, _, part = kind.partition(":")
    if kind == "pdf":
        text, pages = _pdf(data, part, warnings)
    elif kind == "docx":
        text, pages = _docx(data), 1
    elif kind == "html":
        text, pages = _html(data), 1
    else:
        text, pages = _ocr(data), 1
    return {"text": text, "pages": pages, "warnings": warnings}


# --- PDF ---------------------------------------------------------------------------------------


def _pdf(data: bytes, part: str, warnings: list[str]) -> tuple[str, int]:
    """The text of the PDF, or of a part of it, and how many pages it has."""
    import pypdfium2  # type: ignore[import-untyped]

    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if error.err_code == _PASSWORD:
            raise UnreadableDocument(
                "encrypted", "the PDF asks for a password; save it without"
            ) from None
        raise UnreadableDocument("corrupt", f"it begins like a PDF and is none: {error}") from None
    with document:
        count = len(document)
        if count == 0:
            raise UnreadableDocument("corrupt", "the PDF has no pages")
        if part:
            return "" if part == COUNT else _page_text(document, int(part)), count
        texts, length, damaged = [], 0, 0
        for number in range(min(count, MAX_PAGES)):
            try:
                page = document[number]
                texts.append("\n".join(_page_lines(page)))
                page.close()
            except pypdfium2.PdfiumError:
                damaged += 1
                continue
            length += len(texts[-1])
            if length > MAX_CHARACTERS:
                break
        if not texts:
            raise UnreadableDocument("corrupt", f"none of the PDF's {count} pages can be read")
        if damaged:
            warnings.append(f"{damaged} of {count} pages are damaged and were left out")
        if count > MAX_PAGES:
            warnings.append(f"only the first {MAX_PAGES} of {count} pages were read")
        text = "\n\n".join(texts)
        if not text.strip() and _has_pictures(document):
            text = _ocr_of_pages(document, warnings)
        return text, count


def _page_text(document: Any, number: int) -> str:
    """The text of one page, by OCR if it has only pictures."""
    import pypdfium2
    import pypdfium2.raw as raw  # type: ignore[import-untyped]

    try:
        page = document[number - 1]
        text = "\n".join(_page_lines(page))
    except pypdfium2.PdfiumError:
        raise UnreadableDocument("corrupt", "the page is damaged") from None
    except IndexError:
        raise UnreadableDocument("corrupt", f"the PDF has only {len(document)} pages") from None
    if text.strip() or not raw.FPDFPage_CountObjects(page):
        return text
    return _ocr_of_page(page, "the page has no text, only pictures")


def _page_lines(page: Any) -> Iterator[str]:
    """The words of the page as rows, with a tab between columns.

    PDF has no rows: a table may be drawn column by column, and its text does not contain the gap
    between two columns.
    """
    rows: list[list[_Word]] = []
    for word in sorted(_words(page), key=lambda word: -word.middle):
        if rows and rows[-1][0].middle - word.middle < max(rows[-1][0].height, word.height) / 2:
            rows[-1].append(word)
        else:
            rows.append([word])
    above = None
    for row in rows:
        row.sort(key=lambda word: word.left)
        if above is not None and above - row[0].middle > 2.2 * row[0].height:
            yield ""
        above = row[0].middle
        line, right = row[0].text, row[0].right
        for word in row[1:]:
            gap = (word.left - right) / word.height
            line += ("\t" if gap > 0.9 else " " if gap > 0.1 else "") + word.text
            right = word.right
        yield line


class _Word:
    __slots__ = ("height", "left", "middle", "right", "text")

    def __init__(self, text: str, left: float, right: float, bottom: float, top: float) -> None:
        self.text, self.left, self.right = text, left, right
        self.middle, self.height = (bottom + top) / 2, max(top - bottom, 1.0)


def _words(page: Any) -> Iterator[_Word]:
    import pypdfium2.raw as raw

    text_page = page.get_textpage()
    handle = text_page.raw
    count = min(raw.FPDFText_CountChars(handle), MAX_CHARACTERS)
    box = raw.FS_RECTF()
    place = ctypes.byref(box)

    text = text_page.get_text_range(0, count) if count > 0 else ""
    if len(text) != count:  # some characters count as two or as none: read one by one
        text = "".join(chr(raw.FPDFText_GetUnicode(handle, i) or 32) for i in range(count))
    start = 0
    for word in text.split():
        start = text.index(word, start)
        end = start + len(word) - 1
        if raw.FPDFText_GetLooseCharBox(handle, start, place):
            left, right, bottom, top = box.left, box.right, box.bottom, box.top
            if end > start and raw.FPDFText_GetLooseCharBox(handle, end, place):
                right = box.right
            yield _Word(word, left, right, bottom, top)
        start = end + 1
    text_page.close()


def _has_pictures(document: Any) -> bool:
    import pypdfium2.raw as raw

    return any(raw.FPDFPage_CountObjects(page) for page in document)


def _ocr_of_pages(document: Any, warnings: list[str]) -> str:
    """The text of a scanned PDF."""
    count = len(document)
    if count > MAX_OCR_PAGES:
        warnings.append(f"only the first {MAX_OCR_PAGES} of {count} scanned pages were read")
    what = "the PDF has no text, only pictures"
    numbers = range(min(count, MAX_OCR_PAGES))
    return "\n\n".join(_ocr_of_page(document[number], what) for number in numbers)


def _ocr_of_page(page: Any, what: str) -> str:
    try:
        return _ocr(_bitmap(page), what)
    except UnreadableDocument as error:
        if error.type != "corrupt":
            raise
        # The bitmap is ours, so it is not damaged: tesseract itself does not work.
        raise UnreadableDocument("no_ocr", str(error)) from None


def _bitmap(page: Any) -> bytes:
    """The page as a grey bitmap (PGM), which needs no library to write."""
    width, height = page.get_size()
    scale = OCR_DOTS_PER_INCH / 72
    scale = min(scale, (MAX_PIXELS / max(width * height, 1.0)) ** 0.5)
    bitmap = page.render(scale=scale, grayscale=True)
    rows = memoryview(bitmap.buffer).cast("B")
    lines = (rows[y * bitmap.stride :][: bitmap.width] for y in range(bitmap.height))
    return b"P5 %d %d 255\n" % (bitmap.width, bitmap.height) + b"".join(lines)


def _ocr(picture: bytes, what: str = "it is a picture") -> str:
    """The text of a picture. `what` the document is, for the error if there is no tesseract."""
    program = shutil.which("tesseract")
    if program is None:
        raise UnreadableDocument(
            "no_ocr",
            f"{what}, and there is no 'tesseract' on PATH to read it; install it, as in: "
            "apt install tesseract-ocr",
        )
    try:
        done = subprocess.run(  # noqa: S603  (the picture is input, not part of the command)
            [program, "stdin", "stdout"],
            input=picture,
            capture_output=True,
            timeout=OCR_SECONDS,
            check=False,
            env={**os.environ, "OMP_THREAD_LIMIT": "1"},
        )
    except subprocess.TimeoutExpired:
        raise UnreadableDocument(
            "too_large", f"tesseract was not done with the picture in {OCR_SECONDS} s"
        ) from None
    if done.returncode != 0:
        said = " ".join(done.stderr.decode("utf-8", "replace").split())[:200]
        raise UnreadableDocument("corrupt", f"tesseract could not read the picture: {said}")
    return done.stdout.decode("utf-8", "replace")


# --- DOCX --------------------------------------------------------------------------------------


def _docx(data: bytes) -> str:
    """Headers, body, footers.

    With lxml alone: python-docx takes 12 ms for the smallest file because it parses every part,
    styles and themes too. The parts with text take 0.3 ms.
    """
    from lxml import etree  # type: ignore[import-untyped]

    # No entity is resolved and nothing is fetched, whatever the file declares.
    parser = etree.XMLParser(resolve_entities=False, no_network=True)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as package:
            lines: list[str] = []
            for name in _text_parts(package, len(data)):
                _word_lines(etree.fromstring(package.read(name), parser), lines)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise UnreadableDocument(
            "corrupt", f"it begins like a DOCX and is damaged: {error}"
        ) from None
    except etree.LxmlError as error:
        raise UnreadableDocument("corrupt", f"a part of the DOCX is no XML: {error}") from None
    return "\n".join(lines)


def _text_parts(package: zipfile.ZipFile, size: int) -> list[str]:
    """The names of the parts with text, in reading order.

    Refuses a file that declares too many bytes; zipfile never unpacks more than declared.
    """
    entries = {entry.filename: entry for entry in package.infolist()}
    body = next((name for name in entries if _BODY.fullmatch(name)), None)
    if body is None:
        what = next((kind for name, kind in _NO_TEXTS.items() if name in entries), "an archive")
        raise UnreadableDocument(
            "unsupported", f"it is {what}, no document with text; save it as PDF"
        )
    heads = sorted(name for name in entries if _HEADER.fullmatch(name))
    feet = sorted(name for name in entries if _FOOTER.fullmatch(name))
    wanted = [entries[name] for name in (*heads, body, *feet)]
    if any(entry.flag_bits & 1 for entry in wanted):
        raise UnreadableDocument("encrypted", "the DOCX asks for a password; save it without")
    unpacked = sum(entry.file_size for entry in wanted)
    if unpacked > MAX_UNPACKED:
        raise UnreadableDocument(
            "too_large",
            f"the DOCX of {size:,} bytes has {unpacked:,} bytes of text once unpacked; "
            f"at most {MAX_UNPACKED:,} are",
        )
    return [entry.filename for entry in wanted]


def _word_lines(element: Any, lines: list[str]) -> None:
    """The paragraphs below this element, a row of a table as one line with tabs."""
    for child in element:
        name = _name(child)
        if name == "p":
            lines.extend(_word_text(child).split("\n"))
        elif name == "tr":
            cells = []
            for cell in child:
                inside: list[str] = []
                _word_lines(cell, inside)
                if _name(cell) in ("tc", "sdt"):
                    cells.append(" ".join(part for part in inside if part.strip()))
            lines.append("\t".join(cells))
        elif name != "Fallback":
            _word_lines(child, lines)


def _word_text(paragraph: Any) -> str:
    parts = []
    for piece in paragraph.iter():
        name = _name(piece)
        if name == "t":
            # A fallback repeats the same text for older programs.
            if not any(_name(above) == "Fallback" for above in piece.iterancestors()):
                parts.append(piece.text or "")
        elif name in ("tab", "br", "cr") and _name(piece.getparent()) == "r":
            parts.append("\t" if name == "tab" else "\n")  # not the tab stop of a style
    return "".join(parts)


def _name(element: Any) -> str:
    """The tag without its namespace: DOCX has two namespaces for the same tags."""
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""


# --- HTML --------------------------------------------------------------------------------------


def _html(data: bytes) -> str:
    """`data` is UTF-8: the caller has converted it."""
    from lxml import etree

    # `huge_tree`: mails have deeply nested tables, and this process is bounded anyway.
    parser = etree.HTMLParser(
        encoding="utf-8", no_network=True, remove_comments=True, remove_pis=True, huge_tree=True
    )
    try:
        root = etree.fromstring(data, parser)
    except etree.LxmlError as error:
        raise UnreadableDocument("corrupt", f"the HTML cannot be parsed: {error}") from None
    if root is None:
        return ""
    page = _HtmlPage()
    walk = etree.iterwalk(root, events=("start", "end"))
    for event, element in walk:
        tag = element.tag
        if event == "end":
            if tag in _BLOCKS:
                page.break_line()
            page.say(element.tail)
            if page.length > MAX_CHARACTERS:
                break
        elif tag in _SILENT or _is_hidden(element):
            walk.skip_subtree()
        else:
            if tag == "tr":
                page.start_row()
            elif tag in ("td", "th"):
                page.start_cell()
            elif tag in _BLOCKS or tag == "br":
                page.break_line()
            page.say(element.text)
    return "\n".join(page.lines)


class _HtmlPage:
    """Lines as a browser would show them; blocks in a cell do not break its row."""

    def __init__(self) -> None:
        self.lines = [""]
        self.length = 0
        self._must_break = False
        self._cells = 0

    def start_row(self) -> None:
        if self.lines[-1]:
            self.lines.append("")
        self._must_break, self._cells = False, 0

    def start_cell(self) -> None:
        if self._cells:
            self.lines[-1] = self.lines[-1].rstrip(" ") + "\t"
            self._must_break = False
        self._cells += 1

    def break_line(self) -> None:
        if self.lines[-1].strip(" ") and self.lines[-1][-1] != "\t":
            self._must_break = True

    def say(self, text: str | None) -> None:
        if not text:
            return
        words = " ".join(text.split())
        if not words:
            if not self._must_break and self.lines[-1] and self.lines[-1][-1] not in " \t":
                self.lines[-1] += " "
            return
        if self._must_break:
            self.lines.append("")
            self._must_break = False
        if text[0].isspace() and self.lines[-1] and self.lines[-1][-1] not in " \t":
            self.lines[-1] += " "
        self.lines[-1] += words + (" " if text[-1].isspace() else "")
        self.length += len(words)


def _is_hidden(element: Any) -> bool:
    style = element.get("style", "")
    return "hidden" in element.attrib or "display:none" in style.replace(" ", "").lower()


# --- the process -------------------------------------------------------------------------------


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until the caller closes the pipe."""
    while head := requests.readline():
        kind, length = head.decode().split()
        data = requests.read(int(length))
        if len(data) < int(length):  # the caller is gone
            return
        answer: dict[str, Any]
        try:
            answer = parse(kind, data)
            answer["text"] = answer["text"][:MAX_CHARACTERS]
        except UnreadableDocument as error:
            answer = {"error": error.type, "message": str(error)}
        except (MemoryError, RecursionError) as error:
            needs = "memory" if isinstance(error, MemoryError) else "levels of nesting"
            answer = {"error": "too_large", "message": f"reading it takes too much {needs}"}
        except ModuleNotFoundError as error:
            answer = {"error": "missing_package", "message": error.name}
        except Exception as error:  # a library failed on a damaged file
            name = kind.partition(":")[0]
            what = f"it cannot be read as {name}: {type(error).__name__} {error}"[:300]
            answer = {"error": "corrupt", "message": what}
        # ASCII, because the text of a PDF can have lone surrogates.
        text = json.dumps(answer).encode("ascii")
        answers.write(b"%d\n%s" % (len(text), text))
        answers.flush()


def main() -> None:
    with suppress(ValueError, OSError):  # not every system supports it
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    with suppress(ModuleNotFoundError):  # before the first request; an error is reported on use
        import_module("lxml.etree")
        import_module("pypdfium2")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not mix with the answers
    with suppress(BrokenPipeError):
        serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()

"""Bytes to text: every kind by its content, and each that cannot be read with a word for why."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dovetail import PermanentError, RetryableError
from dovetail.documents import formats, reading
from dovetail.documents import reading as readers
from dovetail.documents.reading import Reading, extension_warning, parse, read

from ..core.pace import seconds_of
from .making import (
    DRAWING,
    LEFT,
    Mark,
    docx,
    nested_forms,
    paragraph,
    pdf,
    png,
    row,
    sparse,
    tesseract,
    zip_bomb,
)

TABLE = [
    ["Item", "Qty", "Amount"],
    ["Grüner Tee, lose", "2", "1.234,50 €"],
]
ANY = Path("any")
SAMPLES = Path(__file__).parents[2] / "examples" / "documents"


def text_of(data: bytes) -> str:
    return parse(data, ANY).text


def refused(data: bytes, name: str = "file.bin") -> PermanentError:
    with pytest.raises(PermanentError) as failed:
        parse(data, Path(name))
    assert str(failed.value).startswith(f"{name}: ")
    return failed.value


class TestPdf:
    def test_gives_its_rows_as_lines_with_tabs_between_columns(self):
        marks = [
            Mark(LEFT, 780, "Blue Kettle Ltd", 16, bold=True),
            *row(700, [(LEFT, "Tea, loose, 100 g"), (350, "12"), (539, "220.80")]),
            *row(684, [(LEFT, "Kettle"), (350, "1"), (539, "19.00")]),
        ]
        assert parse(pdf([marks]), ANY) == Reading(
            "pdf", "Blue Kettle Ltd\n\nTea, loose, 100 g\t12\t220.80\nKettle\t1\t19.00", 1
        )

    def test_drawn_column_by_column_has_the_same_rows(self):
        names = [Mark(LEFT, 700, "Tea"), Mark(LEFT, 684, "Kettle")]
        prices = [Mark(539, 700, "220.80", flush=True), Mark(539, 684, "19.00", flush=True)]
        assert text_of(pdf([[*names, *prices]])) == "Tea\t220.80\nKettle\t19.00"

    def test_keeps_umlauts_and_currency_signs(self):
        assert text_of(pdf([[Mark(LEFT, 700, "Größe: 5 € (£ 4)")]])) == "Größe: 5 € (£ 4)"

    def test_of_several_pages_is_read_in_order(self):
        pages = [[Mark(LEFT, 700, f"Page {number}")] for number in range(1, 4)]
        assert parse(pdf(pages, compressed=True), ANY) == Reading(
            "pdf", "Page 1\n\nPage 2\n\nPage 3", 3
        )

    def test_after_leading_garbage_is_found(self):
        assert text_of(b"junk from a mailer\r\n" + pdf([[Mark(LEFT, 700, "Here")]])) == "Here"

    def test_that_asks_for_a_password_is_encrypted(self):
        error = refused(pdf([[Mark(LEFT, 700, "x")]], password="hunter2"))
        assert error.type == "encrypted"
        assert "save it without" in str(error)

    def test_that_opens_with_the_empty_password_is_read(self):
        assert text_of(pdf([[Mark(LEFT, 700, "Open")]], password="")) == "Open"

    @pytest.mark.parametrize("cut", [20, 300, 700])
    def test_that_is_cut_off_is_corrupt(self, cut):
        whole = pdf([paragraph(700, "words " * 40)])
        assert refused(whole[:cut]).type == "corrupt"

    def test_without_text_asks_for_ocr(self, monkeypatch, own_readers):
        monkeypatch.setenv("PATH", "/nowhere")
        error = refused(pdf([DRAWING]))
        assert error.type == "no_ocr"
        assert "tesseract" in str(error)

    def test_of_empty_pages_is_empty(self):
        assert refused(pdf([[], []])).type == "empty_file"

    def test_of_many_pages_is_read_in_part_and_warns(self):
        pages = [[Mark(LEFT, 700, f"Page {number}")] for number in range(1, formats.MAX_PAGES + 9)]
        read = parse(pdf(pages), ANY)
        assert read.pages == formats.MAX_PAGES + 8
        assert read.text.endswith(f"Page {formats.MAX_PAGES}")
        assert f"only the first {formats.MAX_PAGES} of" in read.warnings[0]


class TestDocx:
    def test_gives_headers_paragraphs_tables_and_footers_in_order(self):
        made = docx(["Dear reader,", TABLE, "Bye\tnow"], header="Letterhead", footer="Page foot")
        assert parse(made, ANY) == Reading(
            "docx",
            "Letterhead\nDear reader,\nItem\tQty\tAmount\nGrüner Tee, lose\t2\t1.234,50 €\n"
            "Bye\tnow\nPage foot",
            1,
        )

    def test_that_unpacks_to_too_many_bytes_is_refused_before_unpacking(self):
        bomb = zip_bomb(formats.MAX_UNPACKED + 1_000_000)
        assert len(bomb) < 1_000_000
        error = refused(bomb)
        assert error.type == "too_large"
        assert "has 101,000,000 bytes of text once unpacked" in str(error)
        assert seconds_of(lambda: refused(bomb), enough=0.5) <= 0.5

    def test_resolves_no_entity(self, tmp_path):
        (tmp_path / "secret").write_text("hunter2")
        hostile = docx(["Hello PLACE"])
        swapped = _with_part(
            hostile,
            "word/document.xml",
            lambda xml: xml.replace(
                b"<w:document",
                b'<!DOCTYPE d [<!ENTITY x SYSTEM "file://%s/secret">'
                b'<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;">]><w:document' % str(tmp_path).encode(),
                1,
            ).replace(b"PLACE", b"&x;&b;"),
        )
        assert text_of(swapped) == "Hello"

    @pytest.mark.parametrize("cut", [100, -40])
    def test_that_is_cut_off_is_corrupt(self, cut):
        assert refused(docx(["x"])[:cut]).type == "corrupt"

    def test_whose_text_is_invalid_xml_is_corrupt(self):
        broken = _with_part(docx(["x"]), "word/document.xml", lambda xml: xml[:-20])
        assert refused(broken).type == "corrupt"

    def test_with_a_byte_changed_is_corrupt(self):
        made = bytearray(docx(["x " * 500]))
        place = made.index(b"word/document.xml") + 80
        made[place : place + 40] = os.urandom(40)
        assert refused(bytes(made)).type == "corrupt"

    def test_with_a_password_is_encrypted(self):
        locked = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + "EncryptedPackage".encode("utf-16-le")
        assert refused(locked).type == "encrypted"

    def test_of_the_old_binary_format_is_refused_with_advice(self):
        error = refused(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 500, "old.doc")
        assert error.type == "unsupported"
        assert "save it as DOCX or PDF" in str(error)

    def test_that_is_a_spreadsheet_is_refused(self):
        sheet = _with_part(docx(["x"]), "word/document.xml", lambda xml: xml, "xl/workbook.xml")
        error = refused(sheet)
        assert error.type == "unsupported"
        assert "a spreadsheet" in str(error)


class TestHtml:
    def test_gives_the_text_that_a_browser_shows(self):
        page = """<!DOCTYPE html><html><head><title>no</title><style>p{}</style></head><body>
        <h1>Café <b>Nord</b></h1><script>bad()</script><p>Hello<br>there   you</p><table>
        <tr><th>Item</th><th>Price</th></tr>
        <tr><td><p>Latte</p></td><td><div>4,20&nbsp;&euro;</div></td></tr>
        <tr><td></td><td>5</td></tr></table>
        tail<div style="display: none">hidden</div><p hidden>too</p> end<!-- no --></body></html>"""
        assert text_of(page.encode()) == (
            "Café Nord\nHello\nthere you\nItem\tPrice\nLatte\t4,20 €\n\t5\ntail\nend"
        )

    @pytest.mark.parametrize(
        ("encoding", "head"),
        [
            ("utf-8", ""),
            ("cp1252", ""),
            ("iso-8859-15", '<meta charset="iso-8859-15">'),
            ("koi8-r", '<meta http-equiv="Content-Type" content="text/html; charset=koi8-r">'),
            ("utf-8-sig", '<meta charset="cp1252">'),
            ("utf-16", ""),
        ],
    )
    def test_is_decoded_by_its_declared_or_detected_encoding(self, encoding, head):
        word = "Привет" if encoding == "koi8-r" else "Größe 5 €"
        page = f"<html><head>{head}</head><body><p>{word}</p></body></html>"
        assert parse(page.encode(encoding), ANY) == Reading("html", word, 1)

    @pytest.mark.parametrize("charset", ["utf-16", "zlib", "rot13", "punycode", "no-such", "hex"])
    def test_with_an_impossible_encoding_name_is_still_read(self, charset):
        page = f'<html><meta charset="{charset}"><p>Größe</p></html>'
        assert text_of(page.encode()) == "Größe"

    def test_nested_a_thousand_deep_is_read(self):
        assert "deep" in text_of(b"<html><body>" + b"<div>" * 1000 + b"deep")

    def test_that_is_xhtml_is_read(self):
        page = b'<?xml version="1.0" encoding="utf-8"?>\n<html xmlns="x"><body>Hi</body></html>'
        assert parse(page, ANY).kind == "html"


class TestPlainText:
    @pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
    def test_is_decoded(self, encoding):
        data = "Größe: 5 €\r\n\r\n\r\n\r\nEnde  \f\0"[: None if encoding == "utf-16" else -1]
        assert parse(data.encode(encoding), ANY) == Reading("txt", "Größe: 5 €\n\nEnde", 1)

    def test_is_cut_at_the_maximum_length(self):
        read = parse(b"word " * 100_000, ANY)
        assert len(read.text) == reading.MAX_TEXT_LENGTH
        assert read.warnings == ("only its first 200,000 characters were looked at",)

    @pytest.mark.parametrize("data", [b" \n\t ", b"\xef\xbb\xbf", b"\xff\xfe"])
    def test_without_any_text_is_empty(self, data):
        assert refused(data).type == "empty_file"


class TestPictures:
    @pytest.mark.parametrize(
        "data",
        [png(), b"\xff\xd8\xff\xe0" + b"\0" * 40, b"II*\x00" + b"\0" * 40],
        ids=["png", "jpeg", "tiff"],
    )
    def test_without_ocr_name_the_package_to_install(self, data, monkeypatch, own_readers):
        monkeypatch.setenv("PATH", "/nowhere")
        error = refused(data)
        assert error.type == "no_ocr"
        assert "apt install tesseract-ocr" in str(error)

    def test_are_read_by_tesseract_if_it_is_installed(self, tmp_path, monkeypatch, own_readers):
        tesseract(tmp_path, monkeypatch, 'cat > "$0.seen"; echo "INVOICE 7"')
        assert parse(png(), ANY) == Reading("png", "INVOICE 7", 1)
        assert (tmp_path / "tesseract.seen").read_bytes() == png()

    def test_in_a_pdf_are_drawn_and_read_page_by_page(self, tmp_path, monkeypatch, own_readers):
        tesseract(tmp_path, monkeypatch, 'head -c 15 >> "$0.seen"; cat > /dev/null; echo Page')
        assert parse(pdf([DRAWING, DRAWING]), ANY) == Reading("pdf", "Page\n\nPage", 2)
        # Grey bitmaps of A4 at 200 dots per inch.
        assert (tmp_path / "tesseract.seen").read_bytes() == 2 * b"P5 1653 2339 25"

    def test_that_tesseract_cannot_read_are_corrupt(self, tmp_path, monkeypatch, own_readers):
        tesseract(tmp_path, monkeypatch, 'cat > /dev/null; echo "bad header" >&2; exit 1')
        error = refused(png())
        assert error.type == "corrupt"
        assert "bad header" in str(error)


class TestAFileThatIsNoDocument:
    @pytest.mark.parametrize(
        ("data", "type_", "reported"),
        [
            (b"{\\rtf1 hello}", "unsupported", "RTF"),
            (b"GIF89a\x01\x00\x01\x00", "unsupported", "GIF"),
            (b"\x1f\x8b\x08\0\0\0", "unsupported", "gzip"),
            (b"\x7fELF\0\0\1\2", "unsupported", "no kind that is known"),
            (b"PK\x03\x04 torn", "corrupt", "damaged"),
            (bytes(range(256)) * 4, "unsupported", "no kind that is known"),
        ],
    )
    def test_is_refused_with_its_real_type(self, data, type_, reported):
        error = refused(data)
        assert error.type == type_
        assert reported in str(error)

    @pytest.mark.parametrize("name", ["a.pdf", "b.docx", "c.png", "d.txt"])
    def test_but_has_a_document_extension_is_corrupt(self, name):
        assert refused(bytes(range(256)) * 4, name).type == "corrupt"


class TestAFile:
    def test_is_read(self, tmp_path):
        (tmp_path / "a.txt").write_text("Hello")
        assert read(tmp_path / "a.txt") == Reading("txt", "Hello", 1)

    @pytest.mark.parametrize(
        ("name", "kind", "warns"),
        [
            ("a.pdf", "pdf", False),
            ("A.PDF", "pdf", False),
            ("a.pdf", "txt", True),
            ("a.txt", "pdf", True),
            ("a.jpeg", "png", True),
            ("a", "pdf", False),
            ("a.2026", "html", False),
        ],
    )
    def test_with_a_wrong_extension_gives_a_warning_and_is_read(self, tmp_path, name, kind, warns):
        warning = extension_warning(tmp_path / name, kind)
        assert (warning is not None) == warns
        assert not warns or f"its content is {kind}" in warning

    def failed(self, path: Path) -> PermanentError:
        with pytest.raises(PermanentError) as failed:
            read(path)
        return failed.value

    def test_that_does_not_exist_is_not_found(self, tmp_path):
        (tmp_path / "circle.pdf").symlink_to(tmp_path / "circle.pdf")
        for name in ("none.pdf", "x" * 300 + ".pdf", "circle.pdf", "circle.pdf/below.pdf"):
            assert self.failed(tmp_path / name).type == "not_found"

    def test_with_a_disk_error_is_retried(self, tmp_path, monkeypatch):
        def broken(*args: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "open", broken)
        with pytest.raises(RetryableError, match=r"a\.pdf: Input/output error") as failed:
            read(tmp_path / "a.pdf")
        assert failed.value.type == "not_readable"

    def test_of_another_user_is_not_readable(self, tmp_path, monkeypatch):
        def refused_(*args: object) -> int:
            raise OSError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(os, "open", refused_)  # mode bits do not hold for root
        assert self.failed(tmp_path / "a.pdf").type == "not_readable"

    def test_that_is_empty_is_an_empty_file(self, tmp_path):
        (tmp_path / "a.pdf").touch()
        assert self.failed(tmp_path / "a.pdf").type == "empty_file"

    def test_of_200_megabytes_is_refused_without_being_read(self, tmp_path):
        large = sparse(tmp_path / "a.pdf", 200_000_000)
        error = self.failed(large)
        assert error.type == "too_large"
        assert str(error).startswith("a.pdf: 200,000,000 bytes, at most 50,000,000 are read")
        assert seconds_of(lambda: self.failed(large), enough=0.02) <= 0.02

    def test_may_be_as_large_as_the_setting_allows(self, tmp_path, monkeypatch):
        (tmp_path / "a.txt").write_text("12345")
        monkeypatch.setenv("DOVETAIL_DOCUMENTS_MAX_BYTES", "4")
        assert self.failed(tmp_path / "a.txt").type == "too_large"
        monkeypatch.setenv("DOVETAIL_DOCUMENTS_MAX_BYTES", "5")
        assert read(tmp_path / "a.txt").text == "12345"
        monkeypatch.setenv("DOVETAIL_DOCUMENTS_MAX_BYTES", "5 MB")
        assert self.failed(tmp_path / "a.txt").type == "invalid_config"

    def test_that_is_a_folder_or_a_pipe_is_refused_immediately(self, tmp_path):
        os.mkfifo(tmp_path / "pipe.pdf")
        assert "a folder" in str(self.failed(tmp_path))
        assert self.failed(tmp_path / "pipe.pdf").type == "unsupported"


def test_any_damaged_document_is_read_or_fails_with_a_known_error_type():
    chance = random.Random(11)
    whole = [path.read_bytes() for path in sorted(SAMPLES.iterdir())]
    whole += [pdf([[Mark(LEFT, 700, "x")]], password="x"), docx(["x", TABLE], header="y")]
    ends = set()
    for _ in range(250):
        data = bytearray(chance.choice(whole))
        for _ in range(chance.choice([1, 5, 40])):
            place = chance.randrange(len(data))
            match chance.randrange(3):
                case 0:
                    data[place] = chance.randrange(256)
                case 1:
                    del data[place : place + chance.randrange(len(data) - 1)]
                case _:
                    data[place:place] = chance.randbytes(chance.randrange(40))
        try:
            ends.add(parse(bytes(data), ANY).kind)
        except PermanentError as error:
            ends.add(error.type)
    kinds = {"pdf", "docx", "html", "txt"}
    assert ends <= kinds | {"corrupt", "encrypted", "unsupported", "empty_file", "no_ocr"}
    assert kinds | {"corrupt", "unsupported"} <= ends


class TestReaderProcesses:
    def test_are_reused_and_at_most_two(self, own_readers):
        page = pdf([[Mark(LEFT, 700, "Hello")]])
        with ThreadPoolExecutor(8) as threads:
            assert set(threads.map(text_of, [page] * 60)) == {"Hello"}
        kept = [readers._readers.get() for _ in range(readers.MAX_READERS)]
        pids = {reader.process.pid for reader in kept if reader}
        assert 1 <= len(pids) <= 2
        for reader in kept:
            readers._readers.put(reader)
        text_of(page)
        assert readers._readers.queue[-1].process.pid in pids

    def test_that_died_while_idle_are_started_again(self, own_readers):
        page = pdf([[Mark(LEFT, 700, "Hello")]])
        text_of(page)
        process = readers._readers.queue[-1].process
        process.kill()
        process.wait()
        assert text_of(page) == "Hello"

    @pytest.mark.parametrize(
        ("sign", "type_", "readings"),
        [(signal.SIGSEGV, "corrupt", 1), (signal.SIGKILL, "reader_lost", 2), (0, "reader_lost", 2)],
    )
    def test_that_a_document_crashes_fail_only_it_permanently_and_stay_at_most_two(
        self, sign, type_, readings, tmp_path, monkeypatch, own_readers
    ):
        ends = f"os.kill(os.getpid(), {int(sign)})" if sign else "sys.exit(3)"
        (tmp_path / "formats.py").write_text(
            "import os, sys\nsys.stdin.buffer.readline()\n"
            f"print('read', file=open({str(tmp_path / 'readings')!r}, 'a'), flush=True)\n{ends}\n"
        )
        with monkeypatch.context() as patch:
            patch.setattr(readers, "__file__", str(tmp_path / "readers.py"))
            with pytest.raises(PermanentError) as failed:
                parse(pdf([[]]), Path("bad.pdf"))
        assert failed.value.type == type_
        assert len((tmp_path / "readings").read_text().splitlines()) == readings
        if type_ == "reader_lost":
            how = "by SIGKILL and by SIGKILL" if sign else "with exit code 3 and with exit code 3"
            assert f"bad.pdf: 2 processes that read it came to an end, {how}" in str(failed.value)
            assert "it is not tried again" in str(failed.value)
        assert text_of(pdf([[Mark(LEFT, 700, "Hello")]])) == "Hello"

    def test_that_were_killed_from_outside_are_replaced_once(
        self, tmp_path, monkeypatch, own_readers
    ):
        died = tmp_path / "died"
        (tmp_path / "formats.py").write_text(
            f"import os, runpy\nif not os.path.exists({str(died)!r}):\n"
            f"    open({str(died)!r}, 'w')\n    os.kill(os.getpid(), 9)\n"
            f"runpy.run_path({formats.__file__!r}, run_name='__main__')\n"
        )
        monkeypatch.setattr(readers, "__file__", str(tmp_path / "readers.py"))
        assert text_of(pdf([[Mark(LEFT, 700, "Hello")]])) == "Hello"
        assert died.exists()

    def test_that_have_no_memory_left_are_not_replaced(self, tmp_path, monkeypatch, own_readers):
        """A page that draws a form ten times, which draws another ten times, and so on."""
        most = 250_000_000
        text = Path(formats.__file__).read_text()
        (tmp_path / "formats.py").write_text(
            text.replace(f"MAX_MEMORY = {formats.MAX_MEMORY:_}", f"MAX_MEMORY = {most}")
        )
        monkeypatch.setattr(readers, "__file__", str(tmp_path / "readers.py"))
        monkeypatch.setattr(readers, "MAX_MEMORY", most)
        error = refused(nested_forms(depth=20, each=10))
        assert error.type == "too_large"
        assert "takes more than the 0.25 GB of memory" in str(error)
        monkeypatch.undo()
        assert text_of(pdf([[Mark(LEFT, 700, "Hello")]])) == "Hello"

    def test_without_their_libraries_name_the_package_to_install(
        self, tmp_path, monkeypatch, own_readers
    ):
        text = Path(formats.__file__).read_text()
        bare = "import sys\nsys.modules['pypdfium2'] = sys.modules['lxml'] = None\n"
        (tmp_path / "formats.py").write_text(
            text.replace("import ctypes\n", f"import ctypes\n{bare}")
        )
        monkeypatch.setattr(readers, "__file__", str(tmp_path / "readers.py"))
        for data in (pdf([[]]), docx(["x"]), b"<html>x</html>"):
            with pytest.raises(
                PermanentError, match=r"pip install 'dovetail\[documents\]'"
            ) as failed:
                parse(data, ANY)
            assert failed.value.type == "missing_package"

    def test_that_do_not_end_are_killed(self, monkeypatch, own_readers):
        # Some kilobytes that draw ten million characters.
        huge = pdf([[Mark(LEFT, 700, "a" * 5000)] * 2000], compressed=True)
        assert len(huge) < 200_000
        monkeypatch.setattr(readers, "READING_SECONDS", 0.05)
        error = refused(huge)
        assert error.type == "too_large"
        assert "could not be read within 0.05 s" in str(error)
        monkeypatch.setattr(readers, "READING_SECONDS", 60)
        assert text_of(pdf([[Mark(LEFT, 700, "Hello")]])) == "Hello"

    def test_get_no_secret(self, monkeypatch, own_readers):
        monkeypatch.setenv("DOVETAIL_LLM_API_KEY", "hunter2-hunter2")
        text_of(b"<html>x</html>")
        process = readers._readers.queue[-1].process
        known = Path(f"/proc/{process.pid}/environ").read_bytes()
        assert b"PATH=" in known
        assert b"hunter2" not in known

    def test_end_with_the_process_that_started_them(self):
        script = (
            "from dovetail.documents import reading\nfrom pathlib import Path\n"
            "reading.parse(b'<html>x</html>', Path('x'))\n"
            "print(reading._readers.queue[-1].process.pid, flush=True)\n"
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
        pid = int(done.stdout)
        until = time.monotonic() + 10
        while time.monotonic() < until and _is_running(pid):
            time.sleep(0.02)
        assert not _is_running(pid)

    def test_are_not_shared_with_a_forked_process(self):
        """Which is what Celery's pool is."""
        script = (
            "import os\nfrom dovetail.documents import reading\nfrom pathlib import Path\n"
            "def text(word):\n"
            "    return reading.parse(f'<html>{word}</html>'.encode(), Path('x')).text\n"
            "text('before')\n"
            "child = os.fork()\n"
            "same = all(text(f'{child} {i}') == f'{child} {i}' for i in range(200))\n"
            "own = len(reading._readers.queue) == reading.MAX_READERS\n"
            "ended = os.waitpid(child, 0)[1] if child else 0\n"
            "os._exit(0 if same and own and not ended else 1)\n"
        )
        assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _with_part(package: bytes, name: str, change, renamed: str | None = None) -> bytes:
    import io
    import zipfile

    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(package)) as given, zipfile.ZipFile(made, "w") as kept:
        for entry in given.namelist():
            content = given.read(entry)
            if entry == name:
                kept.writestr(renamed or name, change(content))
            else:
                kept.writestr(entry, content)
    return made.getvalue()

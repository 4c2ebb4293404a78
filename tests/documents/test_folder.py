"""Which files are taken, what they are called, and when one counts as done."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from dovetail.documents.files import NoDocuments, document_id, find_documents, source_document
from dovetail.documents.reviews import Reviews, open_reviews

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a document of each kind, and much that is none."""
    folder = tmp_path.resolve() / "in"
    monkeypatch.chdir(tmp_path)
    for name in (
        *("b.pdf", "a.TXT", "deep/er/c.docx", "deep/d.html", "photo.jpeg", "table.xlsx"),
        *(".hidden.txt", ".git/e.txt", "out/json/f.txt", "out/g.txt"),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def names(found: list[str], folder: Path) -> list[str]:
    return [str(Path(path).relative_to(folder)) for path in found]


def test_a_folder_gives_all_readable_files_below_it_in_a_fixed_order(folder: Path) -> None:
    found = find_documents(["in"], folder / "out")
    assert names(found.files, folder) == [
        *("a.TXT", "b.pdf", "photo.jpeg", "deep/d.html", "deep/er/c.docx"),
    ]
    assert (found.others, found.images) == (1, 0)
    assert found.files == find_documents(["in"], folder / "out").files


def test_images_are_left_out_and_counted_if_no_ocr_is_installed(folder: Path) -> None:
    found = find_documents(["in"], folder / "out", images=False)
    assert not any("photo" in path for path in found.files)
    assert found.images == 1


def test_naming_the_results_folder_selects_the_other_files_in_it(folder: Path) -> None:
    found = find_documents(["in/out"], folder / "out")
    assert names(found.files, folder) == ["out/g.txt"]


def test_a_named_file_is_taken_once_whatever_its_extension(folder: Path) -> None:
    (folder / "link.txt").symlink_to(folder / "b.pdf")
    given = ["in/table.xlsx", "in/link.txt", str(folder / "b.pdf"), "in/../in/b.pdf"]
    assert names(find_documents(given, folder / "out").files, folder) == ["table.xlsx", "b.pdf"]


def test_a_quoted_pattern_is_expanded_like_in_a_shell(folder: Path) -> None:
    found = find_documents(["in/**/*.[dh]*"], folder / "out")
    assert names(found.files, folder) == ["deep/d.html", "deep/er/c.docx"]
    with pytest.raises(NoDocuments):
        find_documents(["in/*.txt"], folder / "out")  # only the hidden one ends so


def test_a_file_whose_name_looks_like_a_pattern_is_taken_literally(folder: Path) -> None:
    (folder / "scan [1].txt").write_text("x")
    assert names(find_documents(["in/scan [1].txt"], folder / "out").files, folder) == [
        "scan [1].txt"
    ]


def test_a_folder_cycle_ends(folder: Path) -> None:
    (folder / "deep" / "round").symlink_to(folder)
    (folder / "deep" / "gone.txt").symlink_to(folder / "nowhere")
    os.mkfifo(folder / "pipe.txt")
    assert len(find_documents(["in"], folder / "out").files) == 5


def test_circular_links_do_not_stop_a_folder(folder: Path) -> None:
    (folder / "round.txt").symlink_to("round.txt")
    (folder / "to.txt").symlink_to("fro.txt")
    (folder / "fro.txt").symlink_to(folder / "to.txt")
    (folder / "deep" / "below.txt").symlink_to(folder / "round.txt" / "below.txt")
    (folder / "deep" / "long.txt").symlink_to("x" * 300)
    assert len(find_documents(["in"], folder / "out").files) == 5
    assert len(find_documents(["in/**/*.[htp]*"], folder / "out").files) == 4
    with pytest.raises(NoDocuments, match="leads nowhere"):
        find_documents(["in/round.txt"], folder / "out")


@pytest.mark.parametrize(
    "given", ["~nobody-of-that-name/a.pdf", "x" * 5000, "a\0b.pdf", "in/a.pdf/b"]
)
def test_an_impossible_document_path_is_reported(folder: Path, given: str) -> None:
    with pytest.raises(NoDocuments):
        find_documents([given], folder / "out")


def test_the_named_paths_are_recorded_beside_their_contents(folder: Path) -> None:
    given = ["in/deep", "in/b.pdf", "in/**/*.html"]
    assert find_documents(given, folder / "out").named == [
        folder / "deep",
        folder / "b.pdf",
        folder,
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nope.pdf", "nope.pdf: there is no such file or folder"),
        ("in/*.odt", "nothing matches in/*.odt"),
        ("in/pipe", "in/pipe is neither a file nor a folder"),
        ("in/broken", "in/broken: leads nowhere"),
        ("empty", "no document in empty, only 1 of other kinds; in folders it looks for .docx"),
    ],
)
def test_a_path_without_documents_is_reported(folder: Path, given: str, said: str) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "broken").symlink_to("nowhere")
    (folder.parent / "empty").mkdir()
    (folder.parent / "empty" / "notes.md").touch()
    with pytest.raises(NoDocuments, match=r".") as raised:
        find_documents([given], folder / "out")
    assert said in str(raised.value).replace(f"{folder.parent}/", "")


@pytest.mark.parametrize(
    ("path", "slug"),
    [
        ("/in/Invoice 42.pdf", "invoice-42"),
        ("/in/Rechnung März (Kopie).docx", "rechnung-marz-kopie"),
        ("/in/--.pdf", "document"),
        ("/in/請求書.pdf", "document"),
        (f"/in/{'x' * 250}.txt", "x" * 100),
        ("/in/v1.2_final.txt", "v1.2_final"),
    ],
)
def test_an_id_is_derived_from_the_name_and_is_a_valid_file_name(path: str, slug: str) -> None:
    found = document_id(path)
    assert ID.fullmatch(found)
    assert found.rpartition("-")[0] == slug
    assert found == document_id(path)


def test_the_same_name_in_another_folder_is_another_document() -> None:
    assert document_id("/a/invoice.pdf") != document_id("/b/invoice.pdf")
    assert document_id("/a/invoice.pdf") != document_id("/a/invoice.txt")


# ── what is done ─────────────────────────────────────────────────────────────────────────


class ProcessedDocument:
    """One document that was processed."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "a.txt"
        self.out = folder / "out"
        self.path.write_text("content")
        self.kept = [self.out / "json" / "a.json", self.out / "parquet" / "a.parquet"]
        for file in self.kept:
            file.parent.mkdir(parents=True)
            file.touch()
        name = document_id(str(self.path))
        content = "ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73"
        fields: dict[str, Any] = dict.fromkeys(("type", "vendor", "date", "currency", "total"))
        self.reviews.upsert(
            name,
            file_path=str(self.path),
            extracted={
                **fields,
                "line_items": [],
                "sha256": content,
                "extractor": "rules-1",
                "confidence": 0.9,
            },
            json_path=self.kept[0],
            parquet_path=self.kept[1],
        )

    @property
    def reviews(self) -> Reviews:
        return open_reviews(self.out)

    def is_done(self, extractor: str = "rules-1") -> bool:
        return source_document(str(self.path), self.out, self.reviews, extractor).is_done


@pytest.fixture
def desk(tmp_path: Path) -> ProcessedDocument:
    return ProcessedDocument(tmp_path.resolve())


def test_a_document_is_done_while_its_content_is_the_extracted_content(
    desk: ProcessedDocument,
) -> None:
    assert desk.is_done()
    desk.path.write_text("other content")
    assert not desk.is_done()
    desk.path.write_text("content")
    assert desk.is_done()


def test_another_extractor_processes_it_again_and_an_unknown_one_does_not(
    desk: ProcessedDocument,
) -> None:
    assert not desk.is_done("model:large")
    assert desk.is_done("")


@pytest.mark.parametrize("kept", [0, 1])
def test_a_document_whose_result_file_is_missing_is_not_done(
    desk: ProcessedDocument, kept: int
) -> None:
    desk.kept[kept].unlink()
    assert not desk.is_done()


def test_a_moved_document_is_another_document(desk: ProcessedDocument) -> None:
    desk.path = desk.path.rename(desk.path.with_name("b.txt"))
    assert not desk.is_done()


def test_a_too_large_or_missing_file_has_no_hash_and_is_left_to_the_reader(
    desk: ProcessedDocument, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_DOCUMENTS_MAX_BYTES", "3")
    looked = source_document(str(desk.path), desk.out, desk.reviews, "rules-1")
    assert (looked.sha256, looked.is_done) == ("", False)
    desk.path.unlink()
    assert source_document(str(desk.path), desk.out, desk.reviews, "").sha256 == ""

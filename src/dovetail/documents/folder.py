"""Which files of a folder are documents, their ids, and which are done already.

Files are chosen by the ends of their names; the kind of each is found from its bytes when it is
read.
"""

# Not by `Path.resolve`, `exists` and their like: those raise for links that lead in a circle, for
# names that are too long, for unknown homes, and for what is in a folder that may not be entered.
# ruff: noqa: PTH110, PTH111, PTH112, PTH113, PTH114

from __future__ import annotations

import glob
import hashlib
import os
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail import DovetailError, PermanentError
from dovetail.documents.files import is_file

if TYPE_CHECKING:
    from dovetail.documents.reviews import Review, Reviews

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
    """The error if this path cannot be a param of a run: params are text."""
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
    """Empty if the file cannot be read: the reader of the file reports the error."""
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

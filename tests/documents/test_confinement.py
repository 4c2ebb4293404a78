"""Whatever a run, an output or a document says: nothing outside of the roots is touched.

Beside the root stands a tree that nothing may read, write or delete. It is compared with what it
was after every attack, and so is what links inside of the root lead to.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail import Context, DovetailError, PermanentError
from dovetail.documents import files as confinement
from dovetail.documents import handlers, reviews_sqlite
from dovetail.documents.extraction import content_hash
from dovetail.documents.files import (
    allow,
    confined,
    file_name,
    is_file_name,
    opened_file,
    read_file,
    remove,
    write_atomically,
)
from dovetail.documents.reviews import close_reviews, open_reviews

from .found import extracted

CANARY = "Invoice\nVendor: Canary Ltd\nTotal: 77.77 EUR\n"
TEXT = "Invoice\nVendor: Inside Ltd\nTotal: 12.00 EUR\n"


class ConfinedRoot:
    """A root, and beside it a tree that must stay untouched."""

    def __init__(self, folder: Path) -> None:
        self.root, self.victim = folder / "root", folder / "victim"
        self.make_victim()
        self.make_root()

    def make_victim(self) -> None:
        (self.victim / "json").mkdir(parents=True)
        (self.victim / "parquet" / "day=unknown" / "type=invoice").mkdir(parents=True)
        (self.victim / "precious.db").write_text(CANARY)
        (self.victim / "json" / "doc.json").write_text(CANARY)
        (self.victim / "parquet" / "day=unknown" / "type=invoice" / "doc.parquet").write_text("x")
        with sqlite3.connect(self.victim / "reviews.db") as connection:
            connection.execute("CREATE TABLE secrets (word)")
        connection.close()

    def make_root(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        (self.root / "in").mkdir(parents=True)
        (self.root / "in" / "a.txt").write_text(TEXT)
        (self.root / "way-out").symlink_to(self.victim)
        (self.root / "up").symlink_to("..")
        (self.root / "to-file").symlink_to(self.victim / "precious.db")
        (self.root / "round").symlink_to("round")
        (self.root / "within").symlink_to("in")

    def outside(self) -> dict[str, object]:
        """All of the tree beside the root: names, kinds, modes, contents, times of change."""
        found: dict[str, object] = {}
        for path in sorted(self.root.parent.rglob("*")):
            if not path.is_relative_to(self.root):
                seen = path.lstat()
                content = path.read_bytes() if path.is_file() else b""
                found[str(path)] = (seen.st_mode, seen.st_ino, seen.st_mtime_ns, content)
        return found

    def params(self, **more: Any) -> dict[str, Any]:
        given = {
            "document_id": "doc",
            "file_path": str(self.root / "in" / "a.txt"),
            "out": str(self.root / "out"),
        }
        return given | more


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ConfinedRoot]:
    made = ConfinedRoot(tmp_path)
    monkeypatch.setenv("DOVETAIL_DOCUMENTS_ROOTS", str(made.root))
    for name in ("DATABASE_URL", "LLM_BASE_URL", "LLM_MODEL", "DOCUMENTS_OUT", "REDIS_URL"):
        monkeypatch.delenv(f"DOVETAIL_{name}", raising=False)
    yield made
    close_reviews()


def perform(name: str, config: dict[str, Any], params: dict[str, Any]) -> Any:
    found = getattr(handlers, name)(config, Context(run_id="run-1", node_id=name, params=params))
    return asyncio.run(found) if asyncio.iscoroutine(found) else found


def saved_at(parquet: str, json: str) -> dict[str, Any]:
    saved = {"parquet": {"path": parquet}, "json": {"path": json}}
    return {"extracted": extracted(), **saved, "page": 1}


HANDLERS = (
    *("extract", "save_parquet", "save_json", "record_metrics"),
    *("create_review", "line_items", "auto_approve"),
    *("split", "extract_page", "join_pages"),
)


def test_every_documents_handler_is_attacked() -> None:
    known = {name for name, one in vars(handlers).items() if hasattr(one, "__dovetail_handlers__")}
    assert known <= set(HANDLERS)
    assert all(callable(getattr(handlers, name)) for name in HANDLERS)


# --- what was found ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "victim",
    [
        "{out}/../../victim/precious.db",
        "{out}/parquet/../../../victim/precious.db",
        "{out}/reviews.db",
        "{out}/json/doc.json",
        "{out}/json/other.json",
        "{out}/parquet/day=x/type=../../../../victim/doc.parquet",
        "{out}/parquet/day=2026-03-04/type=invoice/other.parquet",
        "{root}/in/a.txt",
        "{victim}/precious.db",
        "in/a.txt",
        "",
    ],
)
def test_a_review_cannot_be_pointed_to_a_file_to_delete(ground: ConfinedRoot, victim: str) -> None:
    out = str(ground.root / "out")
    path = victim.format(out=out, root=ground.root, victim=ground.victim)
    good = f"{out}/parquet/day=2026-03-04/type=invoice/doc.parquet"
    before = ground.outside()
    for parquet in (path, good):
        with suppress(PermanentError):
            perform("create_review", saved_at(parquet, f"{out}/json/doc.json"), ground.params())
    assert ground.outside() == before
    assert (ground.root / "in" / "a.txt").read_text() == TEXT
    with pytest.raises(PermanentError, match="is not where 'doc' is saved as parquet") as raised:
        perform("create_review", saved_at(path, f"{out}/json/doc.json"), ground.params())
    assert raised.value.type == "not_allowed"
    assert "DOVETAIL_DOCUMENTS_ROOTS" in str(raised.value)


def test_a_manipulated_row_of_a_review_deletes_no_other_file(ground: ConfinedRoot) -> None:
    out = ground.root / "out"
    config = saved_at(
        f"{out}/parquet/day=2026-03-04/type=invoice/doc.parquet", f"{out}/json/doc.json"
    )
    perform("create_review", config, ground.params())
    close_reviews()
    for path in ("../../victim/precious.db", str(ground.victim / "precious.db"), "../in/a.txt"):
        with sqlite3.connect(out / "reviews.db") as connection:
            connection.execute(
                "UPDATE document_reviews SET parquet_path = ?, json_path = ?", (path, path)
            )
        connection.close()
        before = ground.outside()
        perform("create_review", config, ground.params())
        close_reviews()
        assert ground.outside() == before
        assert (ground.root / "in" / "a.txt").exists()


@pytest.mark.parametrize(
    "kind", ["x/../../../../victim", "..", "/victim", "a/b", "\0", "", "x" * 300, "Ä", "a b", None]
)
def test_a_document_type_becomes_the_name_of_one_folder(ground: ConfinedRoot, kind: Any) -> None:
    before = ground.outside()
    saved = None
    with suppress(Exception):  # Parquet has no column for every one of them
        saved = perform("save_parquet", {"extracted": extracted(type=kind)}, ground.params())
    assert ground.outside() == before
    if kind is None:
        return
    assert saved is not None
    folder = Path(saved["path"]).parent
    assert folder.parent == ground.root / "out" / "parquet" / "day=2026-03-04"
    assert is_file_name(folder.name.removeprefix("type="))


@given(st.one_of(st.text(), st.none(), st.integers(), st.text("./\\\0ab-=", max_size=12)))
def test_every_value_gives_a_valid_and_unambiguous_file_name(value: Any) -> None:
    name = file_name(value)
    assert is_file_name(name)
    assert name == str(value) or name != file_name(name + "x")
    assert file_name(value) == name


# --- random paths ------------------------------------------------------------------------------

PARTS = st.sampled_from(
    [
        *("..", ".", "", "in", "out", "a.txt", "json", "parquet", "new", "victim", "root"),
        *("way-out", "up", "to-file", "round", "within", "precious.db", "doc.json", "reviews.db"),
        *("day=unknown", "type=invoice", "doc.parquet", ".cache", "~", "x\0y", "\ud800", "x" * 300),
        *("day=2026-03-04", "..\\victim", "%2e%2e", "…"),
    ]
)


@st.composite
def paths(draw: st.DrawFn) -> str:
    """From the root, the out, the victim, or nowhere; {…} is filled in by the test."""
    start = draw(st.sampled_from(["{root}", "{root}/out", "{victim}", "{root}/..", "", "/"]))
    return "/".join([start, *draw(st.lists(PARTS, max_size=6))])


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    name=st.sampled_from(HANDLERS),
    file_path=st.one_of(st.just("{root}/in/a.txt"), paths()),
    out=st.one_of(st.just("{root}/out"), paths()),
    parquet=st.one_of(st.just("{root}/out/parquet/day=unknown/type=invoice/doc.parquet"), paths()),
    json=st.one_of(st.just("{root}/out/json/doc.json"), paths()),
    kind=st.one_of(st.just("invoice"), PARTS, paths()),
    day=st.one_of(st.just("2026-03-04"), st.none(), PARTS, paths()),
    document_id=st.one_of(st.just("doc"), PARTS),
    sha256=st.one_of(st.just(""), PARTS, paths()),
)
def test_no_path_leads_a_handler_out_of_the_roots(
    ground: ConfinedRoot, name: str, file_path: str, out: str, parquet: str, json: str, **more: Any
) -> None:
    def filled(text: Any) -> Any:
        if not isinstance(text, str):
            return text
        return text.replace("{root}", str(ground.root)).replace("{victim}", str(ground.victim))

    more = {key: filled(value) for key, value in more.items()}
    found = extracted(type=more["kind"], date=more["day"])
    config = {
        "extracted": found,
        "sha256": more["sha256"],
        "extractor": "",
        "page": 1,
        "parquet": {"path": filled(parquet)},
        "json": {"path": filled(json)},
    }
    params = {"document_id": more["document_id"]}
    params |= {"file_path": filled(file_path), "out": filled(out)}
    before = ground.outside()
    reported = None
    with suppress(Exception):
        reported = perform(name, config, params)
        # Once more, with a good path: this is when an earlier one would be deleted.
        perform(name, config | {"parquet": {"path": filled(parquet) + "x"}}, params)
    close_reviews()
    assert ground.outside() == before
    assert "Canary" not in str(reported)
    assert (ground.root / "in" / "a.txt").read_text() == TEXT


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(path=paths())
def test_no_path_leads_a_file_out_of_the_roots(ground: ConfinedRoot, path: str) -> None:
    place = Path(path.replace("{root}", str(ground.root)).replace("{victim}", str(ground.victim)))
    before = ground.outside()
    for act in (
        lambda: write_atomically(place, b"mine"),
        lambda: read_file(place),
        lambda: content_hash(place),
        lambda: remove(place),
        lambda: open_reviews(place).approve("doc", by="x"),
    ):
        with suppress(DovetailError, OSError):
            if act() == CANARY.encode():
                pytest.fail(f"{place} was read")
    assert ground.outside() == before
    ground.make_root()


# --- links that are put there meanwhile --------------------------------------------------------


def swap(ground: ConfinedRoot, place: Path) -> None:
    """What is there becomes a link to the same place beside the root."""
    if not place.is_symlink():
        place.rename(place.with_name(f"{place.name}-before"))
        place.symlink_to(ground.victim)


@pytest.mark.parametrize("part", ["out", "out/json", "out/parquet", "out/.cache", "in"])
@pytest.mark.parametrize("name", HANDLERS)
def test_a_link_created_after_the_check_leads_nowhere(
    ground: ConfinedRoot, monkeypatch: pytest.MonkeyPatch, part: str, name: str
) -> None:
    (ground.victim / "a.txt").write_text(CANARY)
    out = ground.root / "out"
    config = saved_at(
        f"{out}/parquet/day=2026-03-04/type=invoice/doc.parquet", f"{out}/json/doc.json"
    )
    for one in HANDLERS[:5]:
        perform(one, config, ground.params())
    close_reviews()
    before = ground.outside()
    real = confinement._is_within

    def looked_then_swapped(path: str) -> bool:
        found = real(path)
        swap(ground, ground.root / part)
        return found

    monkeypatch.setattr(confinement, "_is_within", looked_then_swapped)
    reported = ""
    with suppress(DovetailError):
        other = {**config, "extracted": extracted(date=None)}
        reported = str(perform(name, other, ground.params()))
    close_reviews()
    assert ground.outside() == before
    assert "Canary" not in reported


def test_a_document_replaced_by_a_link_is_refused_by_name(
    ground: ConfinedRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = ground.root / "in" / "a.txt"
    real = confinement._is_within

    def looked_then_swapped(path: str) -> bool:
        found = real(path)
        document.unlink(missing_ok=True)
        document.symlink_to(ground.victim / "precious.db")
        return found

    monkeypatch.setattr(confinement, "_is_within", looked_then_swapped)
    by_a_detour = ground.root / "in" / ".." / "in" / "a.txt"
    with (
        pytest.raises(PermanentError, match="became a link while it was used") as raised,
        opened_file(by_a_detour),
    ):
        pytest.fail("it was opened")
    document.unlink()
    document.write_text(TEXT)
    with pytest.raises(PermanentError, match="leads to"), opened_file(document):
        pytest.fail("it was opened")
    document = by_a_detour
    assert raised.value.type == "not_allowed"
    assert str(document) in str(raised.value)
    assert str(ground.root) in str(raised.value)


def test_a_database_that_is_swapped_while_sqlite_opens_it_is_refused(
    ground: ConfinedRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sqlite3.connect

    def swapped_then_connected(*given: Any, **more: Any) -> sqlite3.Connection:
        swap(ground, ground.root / "out")
        return real(*given, **more)

    before = ground.outside()
    monkeypatch.setattr(reviews_sqlite.sqlite3, "connect", swapped_then_connected)
    with pytest.raises(PermanentError, match="became a link while it was used"):
        perform("record_metrics", {"extracted": extracted()}, ground.params())
    close_reviews()
    assert ground.outside() == before


@pytest.mark.parametrize("name", ["reviews.db", "reviews.db-wal", "reviews.db-shm"])
def test_a_database_that_is_a_link_is_refused(ground: ConfinedRoot, name: str) -> None:
    (ground.root / "out").mkdir()
    (ground.root / "out" / name).symlink_to(ground.victim / "reviews.db")
    before = ground.outside()
    with suppress(DovetailError):
        perform("record_metrics", {"extracted": extracted()}, ground.params())
    close_reviews()
    assert ground.outside() == before


def test_a_root_replaced_by_a_link_is_no_longer_the_root(ground: ConfinedRoot) -> None:
    inner = ground.root / "in"
    confined(inner / "a.txt")
    swap(ground, inner)
    before = ground.outside()
    with pytest.raises(PermanentError, match="leads to"):
        write_atomically(inner / "json" / "doc.json", b"mine")
    assert ground.outside() == before


def test_links_within_the_roots_are_followed(ground: ConfinedRoot) -> None:
    found = perform("extract", {}, ground.params(file_path=str(ground.root / "within" / "a.txt")))
    assert found["vendor"] == "Inside Ltd"


def test_links_in_place_of_a_result_are_replaced(ground: ConfinedRoot) -> None:
    (ground.root / "out" / "json").mkdir(parents=True)
    (ground.root / "out" / "json" / "doc.json").symlink_to(ground.victim / "precious.db")
    before = ground.outside()
    saved = perform("save_json", {"extracted": extracted()}, ground.params())
    assert not Path(saved["path"]).is_symlink()
    assert ground.outside() == before


# --- the roots ---------------------------------------------------------------------------------


def test_without_a_setting_the_roots_are_the_working_folder_and_the_named_paths(
    ground: ConfinedRoot, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("DOVETAIL_DOCUMENTS_ROOTS")
    monkeypatch.setattr(confinement, "_named", frozenset())
    monkeypatch.chdir(ground.root)
    assert confined("in/a.txt") == ground.root / "in" / "a.txt"
    with pytest.raises(PermanentError) as raised:
        confined(ground.victim)
    assert str(raised.value) == (
        f"{ground.victim} is in none of the folders that documents may use here: {ground.root} "
        "(DOVETAIL_DOCUMENTS_ROOTS names others; it is not set)"
    )
    allow(ground.victim / "precious.db")
    with opened_file(ground.victim / "precious.db") as file:
        assert os.read(file, 7) == b"Invoice"
    with pytest.raises(PermanentError):
        confined(ground.victim / "json")
    monkeypatch.setenv("DOVETAIL_DOCUMENTS_OUT", str(ground.victim / "results"))
    assert confined(ground.victim / "results" / "json")


def test_the_roots_setting_overrides_the_named_paths(
    ground: ConfinedRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confinement, "_named", frozenset())
    allow(ground.victim)
    with pytest.raises(PermanentError, match=r"leads to .*DOVETAIL_DOCUMENTS_ROOTS names them"):
        confined(f"{ground.root}/../victim/precious.db")


def test_a_document_outside_the_roots_fails_its_node_permanently(ground: ConfinedRoot) -> None:
    path = str(ground.victim / "precious.db")
    with pytest.raises(PermanentError) as raised:
        perform("extract", {}, ground.params(file_path=path))
    assert raised.value.type == "not_allowed"
    for part in (path, str(ground.root), "DOVETAIL_DOCUMENTS_ROOTS"):
        assert part in str(raised.value)


def test_reviews_outside_the_roots_are_refused_instead_of_empty(ground: ConfinedRoot) -> None:
    with pytest.raises(PermanentError, match="DOVETAIL_DOCUMENTS_ROOTS"):
        open_reviews(ground.victim).list()


# --- who may read it ---------------------------------------------------------------------------


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_every_written_file_is_private_to_its_owner_for_any_umask(
    ground: ConfinedRoot, umask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = ground.root / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    seen: set[int] = set()
    real = os.replace

    def looked_at(name: str, new: str, **more: Any) -> None:
        seen.add(stat.S_IMODE(os.stat(name, dir_fd=more["src_dir_fd"]).st_mode))
        real(name, new, **more)

    monkeypatch.setattr(os, "replace", looked_at)
    params = ground.params(out=str(shared / "deep" / "out"))
    found = perform("extract", {}, params)
    config: dict[str, Any] = {"extracted": found}
    config["parquet"] = perform("save_parquet", config, params)
    config["json"] = perform("save_json", config, params)
    for name in ("record_metrics", "create_review"):
        perform(name, config, params)
    made = [path for path in shared.rglob("*") if path != shared]
    assert {path.name for path in made} >= {"reviews.db", "reviews.db-wal", "reviews.db-shm"}
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in made}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert seen == {0o600}
    assert stat.S_IMODE(shared.stat().st_mode) == 0o755, "a folder of the user is left as it is"

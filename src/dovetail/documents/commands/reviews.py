"""`dovetail documents reviews`: what was found, as people see it, correct it and approve it."""

from __future__ import annotations

import getpass
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Annotated, Any, Literal

import typer

from dovetail.cli import output as streams
from dovetail.cli.options import AsJson, declarations
from dovetail.cli.output import InvalidInput, headed, print_json, print_lines, print_reply
from dovetail.cli.summary import command
from dovetail.cli.text import Line, Piece, clip, plain, table
from dovetail.core.errors import Conflict, NotFound
from dovetail.documents.commands import By, Document, Out, folder_of, typed_out
from dovetail.documents.reviews import (
    FIELDS,
    PENDING,
    Review,
    Reviews,
    extraction_of,
    open_reviews,
)

MAX_MATCHES = 5
MAX_ITEMS = 20
_LONGEST = 60

app = declarations()


@app.command("list")
def list_reviews(
    status: Annotated[
        Literal["pending", "approved"] | None, typer.Option(help="Only those in this state.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = 50,
    after: Annotated[
        str, typer.Option(metavar="ID", help="Go on after this document, where a list ended.")
    ] = "",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """List documents with what was found in them."""
    # One more than wanted says whether there are more.
    found = open_reviews(folder_of(out)).list(status, limit=limit + 1, after=after)
    items, more = found[:limit], found[limit:]
    if as_json:
        cursor = items[-1].document_id if more else None
        print_json({"items": [review.as_dict() for review in items], "next_cursor": cursor})
        return
    if not items:
        streams.say(_nothing(out, status))
        return
    rows = (document_row(review.document_id, _found(review), review.status) for review in items)
    print_lines(headed(HEAD, rows))
    if more:
        streams.say([(f"more:  --after {plain(items[-1].document_id)}", "dim")])


@app.command()
def show(document: Document, out: Out = None, as_json: AsJson = False) -> None:
    """Show all that was found in a document, and how sure that is."""
    review = _chosen(open_reviews(folder_of(out)), document)
    _print(review, as_json=as_json)
    if not as_json and review.status == PENDING:
        words = command("documents", "reviews", "approve", review.document_id, *typed_out(out))
        streams.say([("if that is right:  ", "dim"), (words, "bold")])


@app.command()
def correct(
    document: Document,
    changes: Annotated[
        list[str],
        typer.Argument(
            metavar="FIELD=VALUE", help="As in total=12.50; nothing after the = empties a field."
        ),
    ],
    by: By = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Put fields right. No extraction changes them after that."""
    values = dict(map(_change, changes))
    _decide(
        out, document, lambda reviews, name: reviews.correct(name, values, by=_who(by)), as_json
    )


@app.command()
def approve(document: Document, by: By = None, out: Out = None, as_json: AsJson = False) -> None:
    """Say that a document's fields are right."""
    _decide(out, document, lambda reviews, name: reviews.approve(name, by=_who(by)), as_json)


def _decide(
    out: str | None, given: str, decision: Callable[[Reviews, str], Review], as_json: bool
) -> None:
    reviews = open_reviews(folder_of(out))
    review = decision(reviews, _chosen(reviews, given).document_id)
    _print(review, as_json=as_json)


def _print(review: Review, *, as_json: bool) -> None:
    print_reply(review.as_dict(), lambda _: _lines(review), as_json=as_json)


def _who(by: str | None) -> str:
    if by:
        return by
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        return "unknown"


def _change(given: str) -> tuple[str, Any]:
    name, equals, text = given.partition("=")
    name = name.strip()
    if not equals:
        raise InvalidInput(f"'{given}': write FIELD=VALUE, as in total=12.50")
    if not text.strip():
        return name, [] if name == "line_items" else None
    if name != "line_items":
        return name, text.strip()
    try:
        return name, json.loads(text)
    except ValueError as error:
        raise InvalidInput(
            'line_items: write JSON, as in line_items=\'[{"description": "Tea", "amount": 3}]\'; '
            f"{error}"
        ) from None


def _chosen(reviews: Reviews, given: str) -> Review:
    """The one of that id, or the only one whose id begins so."""
    found = reviews.get(given)
    if found is not None:
        return found
    matches = reviews.list(prefix=given, limit=MAX_MATCHES + 1) if given else []
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = [review.document_id for review in matches[:MAX_MATCHES]]
        more = " and more" if len(matches) > MAX_MATCHES else ""
        raise Conflict(f"'{given}' may be {', '.join(names)}{more}; write more of it")
    known = [review.document_id for review in reviews.list(limit=_ASKED)]
    near = get_close_matches(given, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise NotFound(f"no document '{given}' in {reviews.out}{hint}")


_ASKED = 10_000
"""So many ids are compared with one that was mistyped."""


def _nothing(out: str | None, status: str | None) -> Line:
    what = f"nothing is {status}" if status else "no document was processed"
    processing = command("documents", "process", "PATH", *typed_out(out))
    folder = plain(str(folder_of(out)))
    return [(f"{what} in {folder};  ", ""), (processing, "bold"), ("  makes reviews", "")]


def _found(review: Review) -> dict[str, Any]:
    return {**review.fields, "confidence": review.confidence}


def _lines(review: Review) -> Iterator[Line]:
    by = f" by {plain(review.approved_by)}" if review.approved_by else ""
    yield [(review.document_id, "bold"), (f"  {review.status}{by}", "")]
    kept = extraction_of(review)
    sure = _confidences(kept)
    rows = [_field_row(review, name, sure.get(name)) for name in FIELDS]
    rows.append(_row("all of it", "", *sure_piece(review.confidence)))
    fields = table(rows, streams.room())
    for name in FIELDS:
        yield next(fields)
        if name == "line_items":
            yield from _items(review.fields[name])
    yield from fields
    for warning in warnings_in(kept):
        yield [("  ! ", "wait"), (warning, "wait")]
    for name, path in _files(review):
        yield [(f"  {name:8}", "dim"), (plain(path), "")]


def _row(name: str, value: str, note: str, style: str = "dim") -> Line:
    return [(f"  {name}", "dim"), (value, ""), (note, style)]


def _field_row(review: Review, name: str, sure: float | None) -> Line:
    value = review.fields[name]
    if isinstance(value, list):
        value = len(value) or None
    elif isinstance(value, int | float):
        value = money(value)
    shown = "–" if value is None else clip(plain(value), _LONGEST)
    if name in review.locked:
        return _row(name, shown, f"corrected by {plain(review.corrected_by or '')}", "good")
    return _row(name, shown, *sure_piece(sure))


def _items(items: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    rows: list[Line] = [
        [
            (f"    {clip(plain(item['description']), _LONGEST)}", ""),
            (_per_piece(item), "dim"),
            ("" if item["amount"] is None else money(item["amount"]), ""),
        ]
        for item in items[:MAX_ITEMS]
    ]
    yield from table(rows, streams.room()) if rows else ()
    if len(items) > MAX_ITEMS:
        yield [(f"    and {len(items) - MAX_ITEMS:,} more; --json prints all of them", "dim")]


def _per_piece(item: Mapping[str, Any]) -> str:
    quantity, price = item["quantity"], item["unit_price"]
    parts = [f"{quantity:g}" if quantity is not None else "", money(price) if price else ""]
    return " × ".join(part for part in parts if part)


def _files(review: Review) -> Iterator[tuple[str, str]]:
    yield "file", review.file_path
    yield "json", review.json_path
    yield "parquet", review.parquet_path


def _confidences(kept: Mapping[str, Any]) -> Mapping[str, float]:
    """How sure each field was."""
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        return {name: float(value) for name, value in kept["confidences"].items()}
    return {}


LONGEST = 36
_LONGEST_WARNING = 200
SURE = 0.8
"""What is below it is worth a look, and is shown so."""
HEAD = ("DOCUMENT", "TYPE", "VENDOR", "DATE", "TOTAL", "CONFIDENCE", "STATE")


def document_row(name: str, found: Mapping[str, Any], state: str) -> Line:
    return [
        (clip(plain(name), LONGEST), "bold"),
        (plain(found.get("type") or "–"), ""),
        (clip(plain(found.get("vendor") or "–"), LONGEST), ""),
        (plain(found.get("date") or "–"), ""),
        (total_words(found), ""),
        sure_piece(found.get("confidence")),
        (state, _STYLES.get(state.partition(",")[0], "")),
    ]


_STYLES = {"approved": "good", "pending": "wait", "failed": "bad"}


def total_words(found: Mapping[str, Any]) -> str:
    total, currency = found.get("total"), found.get("currency")
    if total is None:
        return "–"
    return f"{money(total)} {plain(currency)}" if currency else money(total)


def money(amount: float) -> str:
    """With cents, and with more digits only if there are some."""
    cents = f"{amount:,.2f}"
    return cents if float(cents.replace(",", "")) == amount else f"{amount:,.4f}"


def warnings_in(kept: Mapping[str, Any]) -> list[str]:
    found = kept.get("warnings")
    return [clip(plain(one), _LONGEST_WARNING) for one in found] if isinstance(found, list) else []


def sure_piece(confidence: float | None) -> Piece:
    if confidence is None:
        return "–", "dim"
    return f"{confidence:.2f}", "" if confidence >= SURE else "wait"

"""What an extraction finds, without a document that it would have to be found in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from dovetail import Context
from dovetail.config import load_settings
from dovetail.documents.commands.process import settle_by_runs
from dovetail.documents.reviews import Measurement, Review, Reviews, open_reviews


def extracted(**changes: Any) -> dict[str, Any]:
    """The output of the step `extract`."""
    return {
        "document_id": "invoice-7",
        "file_path": "/inbox/invoice-7.pdf",
        "sha256": "ab" * 32,
        "kind": "pdf",
        "pages": 1,
        "characters": 812,
        "type": "invoice",
        "vendor": "Nordlicht Möbel GmbH",
        "date": "2026-03-04",
        "currency": "EUR",
        "total": 1234.56,
        "line_items": [
            {"description": "Stuhl", "quantity": 4.0, "unit_price": 99.99, "amount": 399.96},
            {"description": "Fracht", "quantity": None, "unit_price": None, "amount": 834.6},
        ],
        "confidence": 0.93,
        "confidences": {"vendor": 0.9, "type": 1.0, "total": 0.95},
        "extractor": "rules-1",
        "warnings": [],
        "run_id": "run-1",
        "started_at": 1_790_000_000.0,
        **changes,
    }


def context(node: str, out: object, *, run_id: str = "run-1", **params: Any) -> Context:
    given: dict[str, Any] = {"document_id": "invoice-7", "file_path": "/inbox/invoice-7.pdf"}
    given["out"] = str(out) if isinstance(out, Path) else out  # as it is where it is wrong
    return Context(run_id=run_id, node_id=node, params={**given, **params})


def take_in(
    reviews: Reviews, document_id: str = "invoice-7", *, now: float = 1.0, **found: Any
) -> Review:
    reported = extracted(**found)
    folder = (
        reviews.out
        / "parquet"
        / f"day={reported['date'] or 'unknown'}"
        / f"type={reported['type']}"
    )
    return reviews.upsert(
        document_id,
        file_path=reported["file_path"],
        extracted=reported,
        parquet_path=folder / f"{document_id}.parquet",
        json_path=reviews.out / "json" / f"{document_id}.json",
        now=now,
    )


def measured(key: str = "run-1", **changes: Any) -> Measurement:
    plain = Measurement("invoice-7", key, "success", 0.5, 0.9, 100.0)
    return replace(plain, **changes)


def keep(reviews: Reviews, measured: Measurement) -> bool:
    """Put a row there as it is; whether it was new."""
    before, _ = reviews.measure(measured.document_id, measured.key, lambda found: found or measured)
    return before is None


async def statuses_by_runs(db: Path, out: Path) -> dict[tuple[str, str], str]:
    """Document and run to status, after `documents stats` has asked how the runs ended."""
    reviews = open_reviews(out)
    asked = [one for one in reviews.measurements() if one.may_change]
    await settle_by_runs(load_settings(db=db), out, asked)
    return {(one.document_id, one.key): one.status for one in reviews.measurements()}

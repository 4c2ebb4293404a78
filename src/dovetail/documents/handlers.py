"""The steps of the document pipeline as handlers.

Each says where its document is, calls the part that does the work, and returns what the next
step needs. Id and path of a document come from the params of the run, never from what was
extracted: equal content is extracted once, for whichever document came first. What this file
must not know: how a document is read, or how anything is stored.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail import Context, DovetailError, PermanentError, handler
from dovetail.documents.confinement import confined
from dovetail.documents.files import (
    checked_id,
    checked_result,
    default_out,
    json_path,
    parquet_path,
    saved,
)

EXTRACT_RETRIES = 3
SAVE_RETRIES = 3

AUTO = "auto"
"""Who has approved what nobody has looked at."""

# Says which run extracted it, and when: true of that run alone, and in no file.
_OF_THE_RUN = ("run_id", "started_at")


@dataclass(frozen=True, slots=True)
class Document:
    """Which document a run is about."""

    id: str
    path: str
    out: Path

    @classmethod
    def of(cls, ctx: Context) -> Document:
        given = ctx.params
        path, out = given.get("file_path"), given.get("out") or ""
        for name, value in (("file_path", path), ("out", out or "default")):
            if not isinstance(value, str) or not value or "\0" in value:
                raise PermanentError(f"{name}: {value!r} is no path", type="invalid_params")
        found = cls(
            id=checked_id(given.get("document_id")),
            path=str(Path(str(path)).absolute()),
            out=Path(out).absolute() if out else default_out(),
        )
        # Said at once, and of both. What is opened later is confined when it is opened.
        for place in (found.path, found.out):
            confined(place)
        return found


@handler("documents.extract", max_retries=EXTRACT_RETRIES)
async def extract(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
    """Reads the document and finds its fields: through the language model, or by rules.

    The config says what is to be found there, if that is known: `sha256` and `extractor`.
    """
    from dovetail.documents.extraction import extract as fields_of

    began = time.time()
    document = Document.of(ctx)
    try:
        found = await fields_of(
            document.path,
            document.out,
            # Of the attempt: an endpoint that keeps to the key would repeat an answer of no use.
            idempotency_key=f"{ctx.idempotency_key}:{ctx.attempt}",
            sha256=config.get("sha256") or "",
        )
        _check_extractor(config, found)
    except Exception as error:
        if isinstance(error, PermanentError) or ctx.attempt > EXTRACT_RETRIES:
            await asyncio.to_thread(_record_failure, document, ctx, time.time() - began)
        raise
    if config.get("sha256") and config.get("extractor"):
        # Both were compared: equal content has this output, whichever document asks for it. So it
        # names none, or a duplicate would be given the name of another.
        ctx.decided_by_config()
        return found
    return {**found, "document_id": document.id, "file_path": document.path}


@handler("documents.save_parquet", max_retries=SAVE_RETRIES)
def save_parquet(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
    """Writes what was found as a Parquet file, partitioned by the document's day and type."""
    from dovetail.documents.parquet import parquet_bytes

    document = Document.of(ctx)
    found = _to_be_kept(config, document)
    path = parquet_path(document.out, document.id, found["date"], found["type"])
    return saved(path, parquet_bytes(found))


@handler("documents.save_json", max_retries=SAVE_RETRIES)
def save_json(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
    """Writes what was found as a JSON file."""
    document = Document.of(ctx)
    found = _to_be_kept(config, document)
    text = json.dumps(found, indent=2, sort_keys=True, ensure_ascii=False)
    return saved(json_path(document.out, document.id), f"{text}\n".encode())


@handler("documents.record_metrics", max_retries=SAVE_RETRIES)
def record_metrics(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
    """Counts the document, once: its status, how long it took, how sure it is."""
    document, found = Document.of(ctx), _extracted(config)
    cached = found["run_id"] != ctx.run_id
    seconds = None if cached else max(0.0, time.time() - found["started_at"])
    status = "cached" if cached else "completed"
    counted = _record(document, ctx, status, seconds, found["confidence"])
    return {"status": status, "confidence": found["confidence"], "counted": counted}


@handler("documents.create_review", max_retries=SAVE_RETRIES)
def create_review(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
    """Puts the document before people: one review for each, whatever they corrected kept."""
    from dovetail.documents.reviews import open_reviews

    document = Document.of(ctx)
    review = open_reviews(document.out).upsert(
        document.id,
        file_path=document.path,
        extracted=_extracted(config),
        parquet_path=_path_of(config, "parquet", document),
        json_path=_path_of(config, "json", document),
    )
    return {
        "document_id": review.document_id,
        "status": review.status,
        "fields": review.fields,
        "locked": list(review.locked),
        "confidence": review.confidence,
    }


@handler("documents.line_items")
def line_items(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
    """Adds the line items up and compares them with the total."""
    found = _extracted(config)
    items, total = found["line_items"], found["total"]
    amounts = [item["amount"] for item in items if item["amount"] is not None]
    added = round(sum(amounts), 4)
    return {
        "items": items,
        "count": len(items),
        "sum": added,
        "total": total,
        # Taxes and shipping are no line items: what is missing is told, not judged.
        "difference": None if total is None or not amounts else round(total - added, 4),
    }


@handler("documents.auto_approve", max_retries=SAVE_RETRIES)
def auto_approve(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
    """Approves a review that nobody has decided on."""
    from dovetail.documents.reviews import open_reviews

    document = Document.of(ctx)
    review = open_reviews(document.out).approve(document.id, by=AUTO)
    return {
        "document_id": review.document_id,
        "status": review.status,
        "approved_by": review.approved_by,
    }


def _extracted(config: dict[str, Any]) -> dict[str, Any]:
    found = config.get("extracted")
    if isinstance(found, dict) and "confidence" in found:
        return found
    raise PermanentError(
        "config.extracted: give the output of documents.extract, as in "
        '{extracted: "{{ extract.output }}"}',
        type="invalid_config",
    )


def _to_be_kept(config: dict[str, Any], document: Document) -> dict[str, Any]:
    """What goes into the files: the same for every run over the same content at the same path."""
    from dovetail.documents.reading import extension_warning

    found = _extracted(config)
    kept = {name: value for name, value in found.items() if name not in _OF_THE_RUN}
    misnamed = extension_warning(document.path, found["kind"])
    return {
        **kept,
        "document_id": document.id,
        "file_path": document.path,
        "warnings": [*found["warnings"], *([misnamed] if misnamed else [])],
    }


def _path_of(config: dict[str, Any], name: str, document: Document) -> Path:
    saved_as = config.get(name)
    if isinstance(saved_as, dict) and isinstance(saved_as.get("path"), str):
        return checked_result(name, document.out, document.id, saved_as["path"])
    raise PermanentError(
        f"config.{name}: give the output of documents.save_{name}, as in "
        f'{{{name}: "{{{{ save_{name}.output }}}}"}}',
        type="invalid_config",
    )


def _check_extractor(config: dict[str, Any], found: dict[str, Any]) -> None:
    """Else the output would be kept in the node cache under another's name."""
    wanted = config.get("extractor")
    if wanted and found["extractor"] != wanted:
        raise PermanentError(
            f"this worker extracts with {found['extractor']}, but {wanted} was asked for; set the "
            "same DOVETAIL_LLM_BASE_URL and DOVETAIL_LLM_MODEL where documents are submitted and "
            "where they are extracted, or leave the param extractor out",
            type="other_extractor",
        )


def _record_failure(document: Document, ctx: Context, seconds: float) -> None:
    try:
        _record(document, ctx, "failed", seconds, None)
    except DovetailError as error:  # must not take the place of what went wrong before
        ctx.log.warning("the failure of %s could not be counted: %s", document.id, error)


def _record(
    document: Document, ctx: Context, status: str, seconds: float | None, confidence: float | None
) -> bool:
    from dovetail.documents.metrics import record
    from dovetail.documents.reviews import Measurement

    measured = Measurement(
        document_id=document.id,
        key=ctx.idempotency_key,
        status=status,
        seconds=seconds,
        confidence=confidence,
        finished_at=time.time(),
    )
    return record(document.out, measured)

"""The steps of the document pipeline: as handlers, and as a `WorkflowDAG` that calls them.

Each handler finds its document, calls the module that does the work, and returns what the next
step needs. Id and path of a document come from the params of the run, never from the extraction:
equal content is extracted once, for the first document that has it.

Equal content gives equal bytes of Parquet and JSON, so a rerun changes no file.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail import Context, DovetailError, PermanentError, handler
from dovetail.documents.files import (
    checked_id,
    checked_result,
    confined,
    default_out,
    json_path,
    parquet_path,
    saved,
)

if TYPE_CHECKING:
    from dovetail import WorkflowDAG

# --- Parquet -----------------------------------------------------------------------------------

_DIGITS = 38
_DECIMALS = 9


@cache
def schema() -> Any:
    """The columns. `document_type` instead of `type`, which is the partition: readers that take
    partitions from the path refuse a file with a column of the same name."""
    import pyarrow as pa  # type: ignore[import-untyped]

    # 38 digits, 9 of them decimals, is NUMERIC in BigQuery and DECIMAL(38, 9) elsewhere: exact
    # amounts in every currency, and unit prices and quantities that need more than four places.
    money = pa.decimal128(_DIGITS, _DECIMALS)
    item = pa.struct(
        [
            pa.field("description", pa.string()),
            pa.field("quantity", money),
            pa.field("unit_price", money),
            pa.field("amount", money),
        ]
    )
    return pa.schema(
        [
            pa.field("document_id", pa.string(), nullable=False),
            pa.field("file_path", pa.string(), nullable=False),
            pa.field("sha256", pa.string(), nullable=False),
            pa.field("kind", pa.string(), nullable=False),
            pa.field("pages", pa.int32()),
            pa.field("characters", pa.int64()),
            pa.field("document_type", pa.string(), nullable=False),
            pa.field("vendor", pa.string()),
            pa.field("date", pa.date32()),
            pa.field("currency", pa.string()),
            pa.field("total", money),
            pa.field("line_items", pa.list_(item), nullable=False),
            pa.field("confidence", pa.float64(), nullable=False),
            pa.field("confidences", pa.map_(pa.string(), pa.float64()), nullable=False),
            pa.field("extractor", pa.string(), nullable=False),
            pa.field("warnings", pa.list_(pa.string()), nullable=False),
        ]
    )


def parquet_bytes(found: dict[str, Any]) -> bytes:
    """A Parquet file with one row."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise PermanentError(
            f"Parquet files need pyarrow ({error}): pip install 'dovetail[documents]'",
            type="not_installed",
        ) from None
    table = pa.Table.from_pylist([_row(found)], schema=schema())
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="snappy", use_dictionary=False, store_schema=False)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _row(found: dict[str, Any]) -> dict[str, Any]:
    day = found["date"]
    return {
        **{name: found[name] for name in ("document_id", "file_path", "sha256", "kind")},
        **{name: found[name] for name in ("pages", "characters", "vendor", "currency")},
        **{name: found[name] for name in ("confidence", "extractor", "warnings")},
        "document_type": found["type"],
        "date": None if day is None else date.fromisoformat(day),
        "total": _exact(found["total"]),
        "line_items": [
            {
                "description": item["description"],
                "quantity": _exact(item["quantity"]),
                "unit_price": _exact(item["unit_price"]),
                "amount": _exact(item["amount"]),
            }
            for item in found["line_items"]
        ],
        "confidences": sorted(found["confidences"].items()),
    }


def _exact(number: float | None) -> Decimal | None:
    """The number as written, not its nearest binary fraction."""
    if number is None:
        return None
    return round(Decimal(repr(number)), _DECIMALS)


# --- handlers ----------------------------------------------------------------------------------

EXTRACT_RETRIES = 3
SAVE_RETRIES = 3

AUTO = "auto"
"""The name in `approved_by` if no person has approved."""

# The run that extracted it, and when; not written to files.
_OF_THE_RUN = ("run_id", "started_at")


@dataclass(frozen=True, slots=True)
class DocumentRun:
    """The document of a run."""

    id: str
    path: str
    out: Path

    @classmethod
    def of(cls, ctx: Context) -> DocumentRun:
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
        # Checked early for a clear error. Each file is checked again when it is opened.
        for place in (found.path, found.out):
            confined(place)
        return found


@handler("documents.extract", max_retries=EXTRACT_RETRIES)
async def extract(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
    """Reads the document and finds its fields: through the language model, or by rules.

    The config may have the expected `sha256` and `extractor`.
    """
    from dovetail.documents.extraction import extract as fields_of

    document = DocumentRun.of(ctx)
    await asyncio.to_thread(_begin, document, ctx)
    found = await fields_of(
        document.path,
        document.out,
        # With the attempt: an endpoint that honours the key would repeat a refused answer.
        idempotency_key=f"{ctx.idempotency_key}:{ctx.attempt}",
        sha256=config.get("sha256") or "",
    )
    _check_extractor(config, found)
    if config.get("sha256") and config.get("extractor"):
        # Both were checked, so equal content has this output for every document. It names no
        # document: else a duplicate would get the name of another.
        ctx.decided_by_config()
        return found
    return {**found, "document_id": document.id, "file_path": document.path}


@handler("documents.split", max_retries=EXTRACT_RETRIES)
def split(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
    """Returns the numbers of the document's pages, from 1. A document that is no PDF has one page.

    The config may have the expected `sha256`. Nothing is written: `documents.extract_page` reads
    its page from the document itself.
    """
    from dovetail.documents.extraction import load_unchanged
    from dovetail.documents.reading import split as pages_of

    document = DocumentRun.of(ctx)
    _begin(document, ctx)
    path = Path(document.path)
    data, digest = load_unchanged(path, config.get("sha256") or "")
    kind, count = pages_of(data, path)
    return {"pages": list(range(1, count + 1)), "count": count, "kind": kind, "sha256": digest}


@handler("documents.extract_page", max_retries=EXTRACT_RETRIES)
async def extract_page(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
    """Reads one page of the document and finds its fields, as `documents.extract` does.

    The config has the `page`, from 1, and may have the expected `sha256` and `extractor`. A page
    that no worker can read gives its error as `left_out`, so that the others are kept.
    """
    from dovetail.documents.extraction import extract as fields_of
    from dovetail.documents.pages import BLANK, LEFT_OUT, LEFT_OUT_KEY

    page = config.get("page")
    if not isinstance(page, int) or isinstance(page, bool) or page < 1:
        raise PermanentError(
            f"config.page: {page!r} is no number of a page; give the item of "
            '{for_each: "{{ split.pages }}"}, as in {page: "{{ item }}"}',
            type="invalid_config",
        )
    document = DocumentRun.of(ctx)
    try:
        found = await fields_of(
            document.path,
            document.out,
            idempotency_key=f"{ctx.idempotency_key}:{ctx.attempt}",
            sha256=config.get("sha256") or "",
            page=page,
        )
    except PermanentError as error:
        if error.type not in LEFT_OUT:
            raise
        if error.type != BLANK:  # a blank page loses nothing
            ctx.log.warning("%s", error)
        return {LEFT_OUT_KEY: {"type": error.type, "message": str(error)}}
    _check_extractor(config, found)
    if config.get("sha256") and config.get("extractor"):
        ctx.decided_by_config()  # both were checked
    return found


@handler("documents.join_pages", max_retries=0)
def join_pages(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
    """Joins the pages to the fields of the document, in the form of `documents.extract`.

    It reads the output of its parent itself: the pages together may be too large for a config.
    """
    from dovetail.documents.pages import join

    return join(next(iter(ctx.inputs.values()), None), ctx.run_id)


@handler("documents.save_parquet", max_retries=SAVE_RETRIES)
def save_parquet(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
    """Writes the fields as a Parquet file, partitioned by the day and type of the document."""
    document = DocumentRun.of(ctx)
    found = _to_be_kept(config, document)
    path = parquet_path(document.out, document.id, found["date"], found["type"])
    return saved(path, parquet_bytes(found))


@handler("documents.save_json", max_retries=SAVE_RETRIES)
def save_json(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
    """Writes the fields as a JSON file."""
    document = DocumentRun.of(ctx)
    found = _to_be_kept(config, document)
    text = json.dumps(found, indent=2, sort_keys=True, ensure_ascii=False)
    return saved(json_path(document.out, document.id), f"{text}\n".encode())


@handler("documents.record_metrics", max_retries=SAVE_RETRIES)
def record_metrics(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
    """Records how long the extraction took, and its confidence.

    Provisional: the end of the run decides whether the document counts as a success.
    """
    from dovetail.documents.metrics import note

    document, found = DocumentRun.of(ctx), _extracted(config)
    cached, confidence = found["run_id"] != ctx.run_id, found["confidence"]
    seconds = None if cached else max(0.0, time.time() - found["started_at"])
    note(document.out, document.id, ctx.run_id, seconds, confidence)
    status = "cached" if cached else "success"
    return {"status": status, "confidence": confidence, "seconds": seconds}


@handler("documents.create_review", max_retries=SAVE_RETRIES)
def create_review(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
    """Creates or updates the review of the document; corrections of people stay."""
    from dovetail.documents.reviews import open_reviews

    document = DocumentRun.of(ctx)
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
        # Reported, not judged: taxes and shipping are no line items.
        "difference": None if total is None or not amounts else round(total - added, 4),
    }


@handler("documents.auto_approve", max_retries=SAVE_RETRIES)
def auto_approve(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
    """Approves a review that is not approved yet."""
    from dovetail.documents.reviews import open_reviews

    document = DocumentRun.of(ctx)
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


def _to_be_kept(config: dict[str, Any], document: DocumentRun) -> dict[str, Any]:
    """The content of the files: equal for every run with the same content at the same path."""
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


def _path_of(config: dict[str, Any], name: str, document: DocumentRun) -> Path:
    saved_as = config.get(name)
    if isinstance(saved_as, dict) and isinstance(saved_as.get("path"), str):
        return checked_result(name, document.out, document.id, saved_as["path"])
    raise PermanentError(
        f"config.{name}: give the output of documents.save_{name}, as in "
        f'{{{name}: "{{{{ save_{name}.output }}}}"}}',
        type="invalid_config",
    )


def _check_extractor(config: dict[str, Any], found: dict[str, Any]) -> None:
    """Else the node cache would keep the output under the name of another extractor."""
    wanted = config.get("extractor")
    if wanted and found["extractor"] != wanted:
        raise PermanentError(
            f"this worker extracts with {found['extractor']}, but {wanted} was asked for; set the "
            "same DOVETAIL_LLM_BASE_URL and DOVETAIL_LLM_MODEL where documents are submitted and "
            "where they are extracted, or leave the param extractor out",
            type="other_extractor",
        )


def _begin(document: DocumentRun, ctx: Context) -> None:
    from dovetail.documents.metrics import begin

    try:
        begin(document.out, document.id, ctx.run_id)
    except DovetailError as error:  # a document is processed even if it cannot be counted
        ctx.log.warning("the beginning of %s could not be counted: %s", document.id, error)


# --- as a WorkflowDAG, for scripts and for one Celery task per document --------------------------

RATE_LIMIT = "gemini_api"
SURE = 0.8
"""The confidence from which a review is approved without a person."""

Step = Callable[[dict[str, Any]], Any]
Config = Callable[[dict[str, Any]], dict[str, Any]]


def build_document_processing_dag(
    document_id: str,
    file_path: str | Path,
    *,
    out: str | Path | None = None,
    run_id: str | None = None,
    routed: bool = False,
    pages: bool = False,
) -> WorkflowDAG:
    """The pipeline for one document, with the layers of `pipeline.yaml`, or of `routed.yaml`.

    With `pages` each page of a PDF is extracted on its own, as in `pages.yaml`; it can be combined
    with `routed`.

    `run_id` makes counting the document idempotent: pass the same id to start the same work again.
    The step `extract` waits for the rate limit only if it calls the model: not if rules extract,
    and not if the content is known.
    """
    from dovetail import WorkflowDAG  # slow, and workers that load the handlers do not need it

    params = {
        "document_id": checked_id(document_id),
        "file_path": str(Path(file_path).absolute()),
        "out": str(Path(out).absolute() if out is not None else default_out()),
    }
    run_id = run_id or os.urandom(8).hex()
    steps = _Steps(run_id, params)
    name = "document_pages" if pages else "document_routing" if routed else "document_processing"
    dag = WorkflowDAG(name, on_end=_settling(run_id, params))
    tag = RATE_LIMIT if _makes_a_call(params, pages=pages) else None
    if pages:
        _add_pages(dag, steps, tag)
    else:
        dag.add_step(
            "extract",
            steps.waiting("extract", extract, _nothing),
            resource_tag=tag,
            max_retries=EXTRACT_RETRIES,
        )
    for name, fn in (
        ("save_parquet", save_parquet),
        ("save_json", save_json),
        ("record_metrics", record_metrics),
    ):
        dag.add_step(
            name,
            steps.blocking(name, fn, _extraction),
            depends_on=["extract"],
            max_retries=SAVE_RETRIES,
        )
    if routed:
        dag.add_step(
            "line_items",
            steps.blocking("line_items", line_items, _extraction),
            depends_on=["extract"],
            condition=lambda ctx: ctx["step_outputs"]["extract"]["type"] != "receipt",
        )
    dag.add_step(
        "create_review",
        steps.blocking("create_review", create_review, _saved_paths),
        depends_on=["save_parquet", "save_json"],
        max_retries=SAVE_RETRIES,
    )
    if routed:
        dag.add_step(
            "auto_approve",
            steps.blocking("auto_approve", auto_approve, _nothing),
            depends_on=["create_review"],
            condition=lambda ctx: ctx["step_outputs"]["extract"]["confidence"] >= SURE,
            max_retries=SAVE_RETRIES,
        )
    return dag


def _add_pages(dag: WorkflowDAG, steps: _Steps, tag: str | None) -> None:
    """The steps `split`, `extract_page` and `extract`, which joins the pages."""
    dag.add_step("split", steps.blocking("split", split, _nothing), max_retries=EXTRACT_RETRIES)
    dag.add_step(
        "extract_page",
        steps.for_each_page("extract_page"),
        depends_on=["split"],
        for_each=lambda ctx: ctx["step_outputs"]["split"]["pages"],
        resource_tag=tag,
        max_retries=EXTRACT_RETRIES,
    )
    dag.add_step("extract", steps.joining("extract"), depends_on=["extract_page"])


class _Steps:
    """Wraps handlers as steps of one run; each call gets its config and its own context."""

    def __init__(self, run_id: str, params: dict[str, Any]) -> None:
        self._run_id = run_id
        self._params = params
        self._starts: Counter[str] = Counter()

    def blocking(
        self, name: str, fn: Callable[[dict[str, Any], Context], Any], config: Config
    ) -> Step:
        return lambda ctx: fn(config(ctx["step_outputs"]), self._context(name))

    def waiting(
        self, name: str, fn: Callable[[dict[str, Any], Context], Awaitable[Any]], config: Config
    ) -> Step:
        async def step(ctx: dict[str, Any]) -> Any:
            return await fn(config(ctx["step_outputs"]), self._context(name))

        return step

    def for_each_page(self, name: str) -> Step:
        async def step(ctx: dict[str, Any]) -> Any:
            config = {"page": ctx["item"], "sha256": ctx["step_outputs"]["split"]["sha256"]}
            return await extract_page(config, self._context(f"{name}[{ctx['index']}]"))

        return step

    def joining(self, name: str) -> Step:
        def step(ctx: dict[str, Any]) -> Any:
            pages = {"extract_page": ctx["step_outputs"]["extract_page"]}
            return join_pages({}, self._context(name, pages))

        return step

    def _context(self, name: str, inputs: dict[str, Any] | None = None) -> Context:
        self._starts[name] += 1
        return Context(
            run_id=self._run_id,
            node_id=name,
            attempt=self._starts[name],
            params=self._params,
            inputs=inputs,
        )


def _settling(run_id: str, params: dict[str, Any]) -> Callable[[str], None]:
    """Counts the document by how its run ended."""

    def on_end(status: str) -> None:
        from dovetail.documents.metrics import run_ended

        run_ended(params, run_id, status)

    return on_end


def _nothing(outputs: dict[str, Any]) -> dict[str, Any]:
    return {}


def _extraction(outputs: dict[str, Any]) -> dict[str, Any]:
    return {"extracted": outputs["extract"]}


def _saved_paths(outputs: dict[str, Any]) -> dict[str, Any]:
    return {
        "extracted": outputs["extract"],
        "parquet": outputs["save_parquet"],
        "json": outputs["save_json"],
    }


def _makes_a_call(params: dict[str, Any], *, pages: bool) -> bool:
    """Whether the extraction calls a model: not if rules extract, not for known content.

    Which pages of a document are known is not looked up.
    """
    from dovetail.documents import extraction, rules

    extractor = extraction.extractor_name()
    if extractor == rules.NAME:
        return False
    if pages:
        return True
    try:
        sha256 = extraction.content_hash(params["file_path"])
    except (OSError, PermanentError):
        return True  # the step reports the error
    return extraction.cached(sha256, params["out"], extractor) is None

"""The document pipeline as a `WorkflowDAG`: for scripts, and for one Celery task per document.

The steps call the handlers of the definitions with a context of the same kind, so they do and
return the same wherever they run.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from dovetail import Context, PermanentError, WorkflowDAG
from dovetail.documents import handlers
from dovetail.documents.files import checked_id, default_out

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
) -> WorkflowDAG:
    """The pipeline for one document, with the layers of `pipeline.yaml`, or of `routed.yaml`.

    `run_id` makes counting the document idempotent: pass the same id to start the same work again.
    The step `extract` waits for the rate limit only if it calls the model: not if rules extract,
    and not if the content is known.
    """
    params = {
        "document_id": checked_id(document_id),
        "file_path": str(Path(file_path).absolute()),
        "out": str(Path(out).absolute() if out is not None else default_out()),
    }
    run_id = run_id or os.urandom(8).hex()
    steps = _Steps(run_id, params)
    dag = WorkflowDAG(
        "document_routing" if routed else "document_processing", on_end=_settling(run_id, params)
    )
    dag.add_step(
        "extract",
        steps.waiting("extract", handlers.extract, _nothing),
        resource_tag=RATE_LIMIT if _makes_a_call(params) else None,
        max_retries=handlers.EXTRACT_RETRIES,
    )
    for name in ("save_parquet", "save_json", "record_metrics"):
        dag.add_step(
            name,
            steps.blocking(name, getattr(handlers, name), _extracted),
            depends_on=["extract"],
            max_retries=handlers.SAVE_RETRIES,
        )
    if routed:
        dag.add_step(
            "line_items",
            steps.blocking("line_items", handlers.line_items, _extracted),
            depends_on=["extract"],
            condition=lambda ctx: ctx["step_outputs"]["extract"]["type"] != "receipt",
        )
    dag.add_step(
        "create_review",
        steps.blocking("create_review", handlers.create_review, _saved),
        depends_on=["save_parquet", "save_json"],
        max_retries=handlers.SAVE_RETRIES,
    )
    if routed:
        dag.add_step(
            "auto_approve",
            steps.blocking("auto_approve", handlers.auto_approve, _nothing),
            depends_on=["create_review"],
            condition=lambda ctx: ctx["step_outputs"]["extract"]["confidence"] >= SURE,
            max_retries=handlers.SAVE_RETRIES,
        )
    return dag


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

    def _context(self, name: str) -> Context:
        self._starts[name] += 1
        return Context(
            run_id=self._run_id, node_id=name, attempt=self._starts[name], params=self._params
        )


def _settling(run_id: str, params: dict[str, Any]) -> Callable[[str], None]:
    """Counts the document by how its run ended."""

    def on_end(status: str) -> None:
        from dovetail.documents.metrics import run_ended

        run_ended(params, run_id, status)

    return on_end


def _nothing(outputs: dict[str, Any]) -> dict[str, Any]:
    return {}


def _extracted(outputs: dict[str, Any]) -> dict[str, Any]:
    return {"extracted": outputs["extract"]}


def _saved(outputs: dict[str, Any]) -> dict[str, Any]:
    return {
        "extracted": outputs["extract"],
        "parquet": outputs["save_parquet"],
        "json": outputs["save_json"],
    }


def _makes_a_call(params: dict[str, Any]) -> bool:
    """Whether the extraction calls a model: not if rules extract, not for known content."""
    from dovetail.documents import extraction, rules

    extractor = extraction.extractor_name()
    if extractor == rules.NAME:
        return False
    try:
        sha256 = extraction.content_hash(params["file_path"])
    except (OSError, PermanentError):
        return True  # the step reports the error
    return extraction.cached(sha256, params["out"], extractor) is None

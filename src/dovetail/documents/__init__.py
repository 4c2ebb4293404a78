"""The document pipeline: an application on the public surface of Dovetail, and nothing else.

`--handlers dovetail.documents` loads its handlers, so they are imported here. Whatever
is large (Parquet, readers, databases) is imported in the function that needs it.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.documents.handlers import (
    auto_approve,
    build_document_processing_dag,
    create_review,
    extract,
    extract_page,
    join_pages,
    line_items,
    record_metrics,
    save_json,
    save_parquet,
    split,
)
from dovetail.documents.metrics import connect_dag_signal

if TYPE_CHECKING:
    from dovetail.documents.tasks import batch_process_task, process_document_task

PIPELINE = Path(__file__).with_name("pipeline.yaml")
"""The definition `document_processing`."""
ROUTED = Path(__file__).with_name("routed.yaml")
"""The definition `document_routing`: the same with two conditions."""
PAGES = Path(__file__).with_name("pages.yaml")
"""The definition `document_pages`: the same, with each page of a PDF extracted on its own."""

_HOMES = {
    "batch_process_task": "dovetail.documents.tasks",
    "process_document_task": "dovetail.documents.tasks",
}

__all__ = [
    "PAGES",
    "PIPELINE",
    "ROUTED",
    "auto_approve",
    "batch_process_task",
    "build_document_processing_dag",
    "create_review",
    "extract",
    "extract_page",
    "join_pages",
    "line_items",
    "process_document_task",
    "record_metrics",
    "save_json",
    "save_parquet",
    "split",
]

connect_dag_signal()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dovetail.documents' has no attribute '{name}'")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value

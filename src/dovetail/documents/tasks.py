"""The document pipeline on your own Celery: a document is a task, a batch is a group of them.

Shared tasks: a worker whose app has `include=["dovetail.documents.tasks"]` has both. A batch sends
its documents and retries itself to check whether they have ended. It holds no worker while it
waits, so that one worker alone can do all of it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from celery import group, shared_task, states  # type: ignore[import-untyped]
from celery.backends.base import DisabledBackend  # type: ignore[import-untyped]
from celery.signals import task_revoked  # type: ignore[import-untyped]
from celery.worker.request import Request  # type: ignore[import-untyped]

from dovetail import PermanentError, WorkflowDAG, WorkflowResult
from dovetail.celery import DagGroup, DagRefused, DagTask, result_of
from dovetail.documents.files import checked_id
from dovetail.documents.metrics import connect_dag_signal, run_ended

BATCH_TASK = "dovetail.documents.batch_process_task"
DOCUMENT_TASK = "dovetail.documents.process_document_task"
CHECK_SHARE = 0.05
"""The pause between two checks, as a share of the time that the batch has taken so far."""
MIN_CHECK_SECONDS, MAX_CHECK_SECONDS = 0.1, 5.0
MAX_WAIT_SECONDS = 24 * 3600.0
"""As long as Celery keeps a result by default."""
_SHAPE = 'a document is {"document_id": …, "file_path": …} or the pair of both'


connect_dag_signal()  # whichever of the two packages was imported first


class DocumentTask(NamedTuple):
    document_id: str
    file_path: str


class DocumentRequest(Request):  # type: ignore[misc]
    """Counts a document as failed when the hard time limit kills the process that has it.

    In the worker's own process: the killed one could not count its document.
    """

    def on_timeout(self, soft: bool, timeout: float) -> None:
        super().on_timeout(soft, timeout)
        if not soft and (document := _document_of(self)) is not None:
            run_ended(document, self.id, "FAILED")


@shared_task(  # type: ignore[untyped-decorator]
    bind=True, base=DagTask, name=DOCUMENT_TASK, Request=DocumentRequest
)
def process_document_task(
    self: DagTask, document_id: str, file_path: str, out: str | None = None, pages: bool = False
) -> dict[str, Any]:
    """Process one document in this task; gives `WorkflowResult.to_dict()` with its `document_id`.

    With `pages` each page of a PDF is extracted on its own.

    A document that cannot be processed is a result with the status FAILED, not a failed task.
    """
    task_id = self.request.id  # the same when it is delivered again: the document counts once

    def build(context: dict[str, Any]) -> WorkflowDAG:
        from dovetail.documents.handlers import build_document_processing_dag

        return build_document_processing_dag(
            document_id, file_path, out=out, run_id=task_id, pages=pages
        )

    return {"document_id": document_id, **self.run_here(build, {"doc_id": document_id})}


@task_revoked.connect(sender=process_document_task, weak=False)  # type: ignore[untyped-decorator]
def _terminated(request: Any = None, terminated: bool = False, **_: object) -> None:
    """In the worker's own process, after a revoke killed the process that had the document."""
    if terminated and (document := _document_of(request)) is not None:
        run_ended(document, request.id, "CANCELLED")


def _document_of(request: Any) -> dict[str, Any] | None:
    """The arguments of a message. They are unchecked: only the task checks them."""
    args, kwargs = request.args, request.kwargs
    if not isinstance(args, list | tuple) or not isinstance(kwargs, dict):
        return None
    return {**dict(zip(("document_id", "file_path", "out"), args, strict=False)), **kwargs}


@shared_task(  # type: ignore[untyped-decorator]
    bind=True,
    base=DagTask,
    name=BATCH_TASK,
    max_retries=None,  # another check is no failure
)
def batch_process_task(
    self: DagTask,
    documents: Sequence[Mapping[str, str] | Sequence[str]],
    out: str | None = None,
    *,
    pages: bool = False,
    waiting: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Process documents, each in a task of its own, and return their outcomes.

    Returns `documents` (how many), `completed`, `failed`, `cached`, `lost`, `duration`,
    `docs_per_hour`, and `results` in the order of the documents, each with `document_id`,
    `file_path`, `status`, `error`, `duration`, `confidence`. Called as a function, or where tasks
    are eager, it processes them here, one after the other. With `pages` each page of a PDF is
    extracted on its own. `waiting` is the task's own.
    """
    batch = _read(documents)
    if self.request.called_directly or self.request.is_eager:
        began = time.time()
        done = [process_document_task.apply((*one, out, pages)).result for one in batch]
        return _aggregate(batch, [result_of(one) for one in done], time.time() - began)
    task_ids = [f"{self.request.id}-{place}" for place in range(len(batch))]
    if waiting is None:
        waiting = {"since": time.time(), "ended": 0}
        _send(self, batch, task_ids, out, pages=pages)
    since, ended = waiting["since"], int(waiting["ended"])
    ended += _ended_first(task_ids[ended:])
    waited = time.time() - since
    if ended < len(batch) and waited < MAX_WAIT_SECONDS:
        raise self.retry(
            args=(documents,),
            kwargs={
                "out": out,
                "pages": pages,
                "waiting": {"since": since, "ended": ended},
            },
            countdown=min(max(MIN_CHECK_SECONDS, CHECK_SHARE * waited), MAX_CHECK_SECONDS),
        )
    results = DagGroup(self.request.id, task_ids).collect().results
    _settle_failures(batch, task_ids, out, results)
    return _aggregate(batch, results, waited)


def _settle_failures(
    batch: list[DocumentTask],
    task_ids: list[str],
    out: str | None,
    results: Sequence[WorkflowResult | None],
) -> None:
    """Count documents whose tasks were killed; one that is counted already is not changed."""
    for document, task_id, result in zip(batch, task_ids, results, strict=True):
        if result is not None and result.status != "COMPLETED":
            run_ended({"document_id": document.document_id, "out": out}, task_id, result.status)


def _read(documents: Any) -> list[DocumentTask]:
    if isinstance(documents, str | Mapping) or not isinstance(documents, Sequence):
        raise DagRefused(f"documents is a list; {_SHAPE}")
    batch: list[DocumentTask] = []
    seen: dict[str, int] = {}
    for place, one in enumerate(documents):
        if isinstance(one, Mapping):
            one = [one.get(name) for name in DocumentTask._fields] if len(one) == 2 else one
        if isinstance(one, str | Mapping) or not isinstance(one, Sequence) or len(one) != 2:
            raise DagRefused(f"documents[{place}]: {_SHAPE}")
        document_id, file_path = one
        try:
            checked_id(document_id)
        except PermanentError as problem:
            raise DagRefused(f"documents[{place}]: {problem}") from None
        if not isinstance(file_path, str) or not file_path:
            raise DagRefused(f"documents[{place}]: no file_path; {_SHAPE}")
        if (first := seen.setdefault(document_id, place)) != place:
            raise DagRefused(
                f"documents[{place}] has the id '{document_id}' of documents[{first}]; two of one "
                "id would overwrite each other"
            )
        batch.append(DocumentTask(document_id, file_path))
    return batch


def _send(
    batch_task: DagTask,
    batch: list[DocumentTask],
    task_ids: list[str],
    out: str | None,
    *,
    pages: bool = False,
) -> None:
    """As one group, under ids that a redelivered batch uses again."""
    if isinstance(process_document_task.backend, DisabledBackend):
        raise DagRefused(
            "a batch reads the results of its documents, and this app keeps none: give it a "
            "result_backend, or set DOVETAIL_REDIS_URL"
        )
    where = {}
    if not batch_task.app.conf.task_routes:  # else the routes name the queue
        where = {"queue": batch_task.request.delivery_info["routing_key"]}
    signatures = [
        process_document_task.s(*one, out, pages).set(task_id=task_id, **where)
        for one, task_id in zip(batch, task_ids, strict=True)
    ]
    if signatures:
        group(signatures, app=batch_task.app).apply_async()


def _ended_first(task_ids: list[str]) -> int:
    """How many tasks at the beginning of the list have ended."""
    for many, task_id in enumerate(task_ids):
        if process_document_task.AsyncResult(task_id).state not in states.READY_STATES:
            return many
    return len(task_ids)


def _aggregate(
    batch: list[DocumentTask], results: Sequence[WorkflowResult | None], duration: float
) -> dict[str, Any]:
    outcomes = [_outcome(*one) for one in zip(batch, results, strict=True)]
    counts = dict.fromkeys(("completed", "failed", "cached", "lost"), 0)
    for one in outcomes:
        counts[one["status"]] += 1
    good = counts["completed"] + counts["cached"]
    return {
        "documents": len(batch),
        **counts,
        "duration": duration,
        "docs_per_hour": 3600 * good / duration if good and duration > 0 else 0.0,
        "results": outcomes,
    }


def _outcome(document: DocumentTask, result: WorkflowResult | None) -> dict[str, Any]:
    """`lost`: it has not ended within `MAX_WAIT_SECONDS`."""
    measured = {} if result is None else result.outputs.get("record_metrics") or {}
    if result is None:
        status = "lost"
    elif result.status == "COMPLETED":
        status = "cached" if measured.get("status") == "cached" else "completed"
    else:
        status = "failed"
    return {
        **document._asdict(),
        "status": status,
        "error": None if result is None else result.error,
        "duration": None if result is None else result.duration,
        "confidence": measured.get("confidence"),
    }

"""The answers as the OpenAPI document describes them. The tests hold every answer against it.

Nothing is validated with these on the way out: an answer is what the engine gives. What it must
not know: how an answer comes about.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
NodeState = Literal["PENDING", "QUEUED", "RUNNING", "COMPLETED", "FAILED", "SKIPPED", "CANCELLED"]
RunState = Literal["PENDING", "RUNNING", "COMPLETED", "FAILED", "CANCELLED"]
Seconds = Annotated[float, Field(ge=0)]


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ProblemFound(Answer):
    """One problem of a definition, of params or of a request."""

    code: str
    message: str
    path: str
    line: int = Field(default=1, ge=1)
    column: int = Field(default=1, ge=1)


class ProblemDetails(Answer):
    """RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    request_id: str
    errors: list[ProblemFound] = []
    reasons: list[str] = []


class Warned(Answer):
    """A param that the schema neither names nor forbids."""

    code: Literal["unknown_param"]
    message: str
    path: str


class Registered(Answer):
    name: str
    version: int
    created: bool


class Validation(Answer):
    valid: bool
    errors: list[ProblemFound]
    warnings: list[ProblemFound]
    layers: list[list[str]]


class WorkflowItem(Answer):
    name: str
    latest_version: int
    aliases: dict[str, int]
    created_at: Time
    updated_at: Time


class Workflows(Answer):
    items: list[WorkflowItem]
    next_cursor: str | None


class Workflow(Answer):
    name: str
    version: int
    definition: dict[str, Any]
    aliases: dict[str, int]
    created_at: Time


class VersionItem(Answer):
    version: int
    sha256: str
    created_at: Time


class Versions(Answer):
    items: list[VersionItem]


class Alias(Answer):
    name: str
    alias: str
    version: int


class Triggered(Answer):
    run_id: str
    status: RunState = Field(description="when the run was accepted")
    workflow: str
    version: int | None = Field(description="null for a definition that is not registered")
    created_at: Time
    warnings: list[Warned] = Field(default=[], description="left out if there are none")


class Failure(BaseModel):
    type: str
    message: str
    node: str = ""


_OUTPUT = (
    "a JSON value; one of more than 64 KiB, or one that has a key `$output` itself, is "
    '`{"$output": {"size", "href"}}` unless `outputs=full`: `href` has it'
)


class NodeItem(Answer):
    id: str
    handler: str
    status: NodeState
    attempt: int
    epoch: int
    dependencies: list[str]
    reason: str | None
    cause: str | None
    error: Failure | None
    started_at: Time | None
    finished_at: Time | None
    duration: Seconds | None
    worker: str | None
    output: Any = Field(description=_OUTPUT)


class RunItem(Answer):
    run_id: str
    workflow: str
    version: int | None
    status: RunState
    epoch: int
    params: dict[str, Any]
    created_at: Time
    started_at: Time | None
    finished_at: Time | None
    duration: Seconds | None
    error: Failure | None
    result: Any = Field(description=f"of each output in it: {_OUTPUT}")


class Run(RunItem):
    nodes: list[NodeItem] = Field(default=[], description="left out with `nodes=false`")


class Runs(Answer):
    items: list[RunItem]
    next_cursor: str | None


class Results(Answer):
    status: RunState
    result: Any = Field(description=f"of each output in it: {_OUTPUT}")
    outputs: dict[str, Any] = Field(description=f"by node; each is {_OUTPUT}")


class Reason(Answer):
    id: str
    status: NodeState
    code: Literal[
        "waiting_for_parents",
        "rate_limited",
        "backing_off",
        "queued",
        "no_worker",
        "max_concurrency",
        "running",
        "damaged",
    ]
    why: str
    details: dict[str, Any]


class Explanation(Answer):
    run_id: str
    status: RunState
    nodes: list[Reason]
    damage: list[str] = Field(
        description="where its state disagrees with itself or with its log: `repair` rebuilds it"
    )


class Verified(Answer):
    run_id: str
    divergences: list[str] = Field(description="none, if all is well")


class Repaired(Answer):
    run_id: str
    differences: list[str] = Field(
        description="where its state was not what its log says; none, if there was nothing to do"
    )
    repaired: bool


class RunId(Answer):
    run_id: str


class RetryPlan(Answer):
    rerun: list[str]
    reuse: list[str]


class Event(BaseModel):
    """Some types have more fields."""

    seq: int = Field(ge=1)
    time: Time
    type: str
    epoch: int
    node: str = ""
    attempt: int = 0


class BatchMade(Answer):
    batch_id: str
    count: int
    warnings: list[Warned] = Field(default=[], description="left out if there are none")


class BatchRun(Answer):
    index: int
    run_id: str
    status: RunState


class BatchItem(Answer):
    batch_id: str
    workflow: str
    count: int
    counts: dict[RunState, int]
    created_at: Time
    finished_at: Time | None


class Batches(Answer):
    items: list[BatchItem]
    next_cursor: str | None


class BatchId(Answer):
    batch_id: str


class Batch(BatchItem):
    runs: list[BatchRun]
    next_cursor: str | None


class RateLimit(Answer):
    tag: str
    rate_per_second: float
    burst: int


class RateLimits(Answer):
    items: list[RateLimit]


class HandlerDetails(Answer):
    name: str
    max_retries: int
    secrets: bool | list[str] | None = Field(
        description="where its config may have secrets: anywhere, in these fields, nowhere; "
        "null if the worker does not say"
    )
    version: int


class Worker(Answer):
    worker_id: str
    host: str
    pid: int
    started_at: Time
    last_heartbeat: Time
    handlers: list[str]
    handler_details: list[HandlerDetails]
    running: int
    concurrency: int
    alive: bool


class Workers(Answer):
    items: list[Worker]


class DeadLetters(Answer):
    items: list[dict[str, Any]]


class Health(Answer):
    status: Literal["ok"]


class WorkerCounts(Answer):
    alive: int
    dead: int

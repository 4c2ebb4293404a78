"""Schemas that several resources share, and the values of the examples in the OpenAPI document.

Each resource has its own schemas, bodies and examples beside its endpoints. The schemas describe:
a reply is what the engine gives, and is not validated on the way out. The tests do that.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
NodeStatusName = Literal[
    "PENDING", "QUEUED", "RUNNING", "COMPLETED", "FAILED", "SKIPPED", "CANCELLED"
]
RunStatusName = Literal["PENDING", "RUNNING", "COMPLETED", "FAILED", "CANCELLED"]


class Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ProblemFound(Reply):
    """One problem of a definition, of params or of a request."""

    code: str
    message: str
    path: str
    line: int = Field(default=1, ge=1)
    column: int = Field(default=1, ge=1)


class ProblemDetails(Reply):
    """RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    request_id: str
    errors: list[ProblemFound] = []
    reasons: list[str] = []


class Warned(Reply):
    """A param that the schema neither names nor forbids."""

    code: Literal["unknown_param"]
    message: str
    path: str


# ── examples ─────────────────────────────────────────────────────────────────────────────

RUN = "3f9a51c20b7e4d6f8a1c5e7092b4d6f8"
BATCH = "b7e4d6f83f9a51c28a1c5e7092b4d6f8"
AT = "2026-11-16T06:07:54.123456Z"
STARTED = "2026-11-16T06:07:54.125000Z"
ENDED = "2026-11-16T06:07:54.137500Z"
DEFINITION: dict[str, Any] = {
    "name": "greet",
    "params": {"type": "object", "required": ["who"], "properties": {"who": {"type": "string"}}},
    "nodes": [
        {"id": "start", "handler": "input"},
        {
            "id": "end",
            "handler": "output",
            "dependencies": ["start"],
            "config": {"text": "Hello {{ start.who }}"},
        },
    ],
}

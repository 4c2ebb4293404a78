"""The fields of a document, their bounds and their confidences.

Rules and language model fill the same model; the language model gets its JSON schema.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Type = Literal["invoice", "receipt", "contract", "letter", "other"]
TYPES: tuple[str, ...] = get_args(Type)

MAX_LINE_ITEMS = 500
MAX_TEXT_LENGTH = 300

# More than any document has; a float holds it exactly to the cent.
_MAX_MONEY = 1e13

# The weight of each field that a type must have: a letter has no total.
_OF_MONEY = {"type": 1.0, "vendor": 1.0, "date": 1.0, "currency": 1.0, "total": 2.0}
_OF_WORDS = {"type": 1.0, "vendor": 1.0, "date": 1.0}
_WEIGHTS = {
    "invoice": _OF_MONEY,
    "receipt": _OF_MONEY,
    "contract": _OF_WORDS,
    "letter": _OF_WORDS,
    "other": _OF_WORDS,
}
_WEIGHT_OF_LINE_ITEMS = 1.0


def _real_day(text: str) -> str:
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise ValueError("must be a day as in 2026-03-31") from None


Money = Annotated[float, Field(ge=-_MAX_MONEY, le=_MAX_MONEY, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_LENGTH)]


class _Strict(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        str_strip_whitespace=True,
        json_schema_serialization_defaults_required=True,
    )


class LineItem(_Strict):
    """One row of goods or services."""

    description: Text
    quantity: Money | None = None
    unit_price: Money | None = None
    amount: Money | None = None


class Confidences(_Strict):
    """The confidence of each field, from 0 to 1."""

    type: Share = 0.0
    vendor: Share = 0.0
    date: Share = 0.0
    currency: Share = 0.0
    total: Share = 0.0
    line_items: Share = 0.0


class Fields(_Strict):
    """The fields that were found. A field that was not found is null, never a guess."""

    type: Type
    vendor: Text | None = Field(None, description="who issued the document")
    date: Annotated[str, AfterValidator(_real_day)] | None = Field(
        None, description="the day it was issued, as in 2026-03-31"
    )
    currency: Annotated[str, Field(pattern="^[A-Z]{3}$")] | None = Field(
        None, description="ISO 4217, as in EUR"
    )
    total: Money | None = Field(None, description="what is to be paid, taxes included")
    line_items: Annotated[list[LineItem], Field(max_length=MAX_LINE_ITEMS)] = []
    confidence: Share = Field(description="of the whole")
    confidences: Confidences = Confidences()


def overall(kind: str, confidences: Mapping[str, float]) -> float:
    """The confidence of the whole: half the mean of its fields, half its weakest required field.

    The weakest field counts that much because a document is approved as a whole: four right
    fields do not help if the total is wrong.
    """
    weights = _WEIGHTS.get(kind, _OF_WORDS)
    weakest = min(confidences.get(name, 0.0) for name in weights)
    if weights is _OF_MONEY:
        weights = {**weights, "line_items": _WEIGHT_OF_LINE_ITEMS}
    mean = sum(confidences.get(name, 0.0) * weight for name, weight in weights.items())
    return round((mean / sum(weights.values()) + weakest) / 2, 4)


def json_schema() -> dict[str, Any]:
    """The schema of `Fields` for strict endpoints: every field required, no other allowed."""
    schema: dict[str, Any] = _bare(Fields.model_json_schema(mode="serialization"))
    return schema


def _bare(part: Any) -> Any:
    """Without titles and defaults: strict endpoints refuse defaults."""
    if isinstance(part, list):
        return [_bare(item) for item in part]
    if not isinstance(part, dict):
        return part
    kept = {}
    for key, value in part.items():
        if key in ("properties", "$defs"):  # here the keys are field names
            kept[key] = {name: _bare(inner) for name, inner in value.items()}
        elif key not in ("title", "default"):
            kept[key] = _bare(value)
    return kept

"""The fields of a document, their bounds, and how sure each is.

One model, which the rules and the language model fill; its JSON schema is given to the latter.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Type = Literal["invoice", "receipt", "contract", "letter", "other"]
TYPES: tuple[str, ...] = get_args(Type)

MAX_LINE_ITEMS = 500
LONGEST_TEXT = 300

# Far beyond any document, and within what a float holds to the cent.
_LARGEST = 1e13

# How much a field says about the whole, where the type has it at all: a letter has no total.
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


Money = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1, max_length=LONGEST_TEXT)]


class _Strict(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        str_strip_whitespace=True,
        json_schema_serialization_defaults_required=True,
    )


class LineItem(_Strict):
    """One row of what was bought."""

    description: Text
    quantity: Money | None = None
    unit_price: Money | None = None
    amount: Money | None = None


class Confidences(_Strict):
    """For each field how sure it is, from 0 to 1."""

    type: Share = 0.0
    vendor: Share = 0.0
    date: Share = 0.0
    currency: Share = 0.0
    total: Share = 0.0
    line_items: Share = 0.0


class Fields(_Strict):
    """What was found; none is null, never a guess."""

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
    """How sure the whole is: half the mean of its fields, half the weakest of those it must have.

    The weakest counts so much because a document is approved as a whole: four good fields do
    not make up for a wrong total.
    """
    weights = _WEIGHTS.get(kind, _OF_WORDS)
    weakest = min(confidences.get(name, 0.0) for name in weights)
    if weights is _OF_MONEY:
        weights = {**weights, "line_items": _WEIGHT_OF_LINE_ITEMS}
    mean = sum(confidences.get(name, 0.0) * weight for name, weight in weights.items())
    return round((mean / sum(weights.values()) + weakest) / 2, 4)


def json_schema() -> dict[str, Any]:
    """Of `Fields`, with every field required and nothing else allowed, as strict endpoints want."""
    schema: dict[str, Any] = _bare(Fields.model_json_schema(mode="serialization"))
    return schema


def _bare(part: Any) -> Any:
    """Without titles and defaults: strict endpoints refuse the latter."""
    if isinstance(part, list):
        return [_bare(item) for item in part]
    if not isinstance(part, dict):
        return part
    kept = {}
    for key, value in part.items():
        if key in ("properties", "$defs"):  # here the keys are names of our own
            kept[key] = {name: _bare(inner) for name, inner in value.items()}
        elif key not in ("title", "default"):
            kept[key] = _bare(value)
    return kept

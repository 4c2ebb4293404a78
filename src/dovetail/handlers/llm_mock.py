"""The offline answer of `llm_service`: made from the question alone, so equal for equal input.

Good enough to try a workflow out: it says how much it was given and begins like it, and where
JSON is asked for it answers with JSON that fits the schema. It must not know the endpoint or
the settings. Schemas come from a definition, so they are untrusted: depth and size are bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, floor
from typing import Any

import orjson

from dovetail.core.errors import PermanentError

SHOWN_WORDS = 12
# Below this level only what the schema demands is made, so that recursive schemas end.
GENEROUS_LEVELS = 4
MAX_LEVELS = 32
MAX_VALUES = 1000
MAX_TEXT = 10_000

_FORMATS = {
    "date": "2000-01-01",
    "date-time": "2000-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "email": "mock@example.com",
    "uri": "https://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}


def mock_answer(
    messages: list[dict[str, Any]],
    *,
    model: str,
    wants_json: bool = False,
    json_schema: dict[str, Any] | None = None,
    max_tokens: int | None = None,
) -> dict[str, Any]:
    """What `llm_service` returns without an endpoint; a token is a word here."""
    asked = [word for message in messages for word in _texts(message.get("content"))]
    words = " ".join(_texts(messages[-1].get("content"))).split()
    beginning = " ".join(words[:SHOWN_WORDS]) + ("…" if len(words) > SHOWN_WORDS else "")
    if json_schema is not None:
        text = orjson.dumps(sample(json_schema.get("schema", {}))).decode()
    elif wants_json:
        text = orjson.dumps({"mock": True, "words": len(words), "text": beginning}).decode()
    else:
        text = f"[mock] Summary of {len(words)} words: {beginning}"
        if max_tokens is not None:
            text = " ".join(text.split(" ")[:max_tokens])
    prompt_tokens = sum(len(part.split()) for part in asked)
    completion_tokens = len(text.split())
    return {
        "text": text,
        "model": model,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
        "mock": True,
    }


def _texts(content: Any) -> Iterator[str]:
    """The text in a message's content, which is a string or a list of parts."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            if isinstance(part.get("text"), str):
                yield part["text"]


def sample(schema: Any) -> Any:
    """A small value that fits a JSON Schema; `pattern`, `not` and `if` are not considered."""
    try:
        return _Sampler(schema).value(schema, 0)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
        raise PermanentError(
            "response_format: the mock cannot read this JSON Schema", type="invalid_config"
        ) from None


class _Sampler:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = MAX_VALUES

    def value(self, schema: Any, level: int) -> Any:
        self._left -= 1
        if self._left < 0 or level > MAX_LEVELS:
            raise PermanentError(
                "response_format: the schema is too deep or too large for the mock",
                type="too_large",
            )
        if schema is True:
            return None
        for word in ("const", "default"):
            if word in schema:
                return schema[word]
        if "enum" in schema:
            return schema["enum"][0]
        if "$ref" in schema:
            return self.value(self._target(schema["$ref"]), level + 1)
        for word in ("anyOf", "oneOf"):
            if word in schema:
                rest = {name: part for name, part in schema.items() if name != word}
                return self.value(_merged([rest, schema[word][0]]), level + 1)
        if "allOf" in schema:
            rest = {name: part for name, part in schema.items() if name != "allOf"}
            parts = [self._target(p["$ref"]) if "$ref" in p else p for p in schema["allOf"]]
            return self.value(_merged([rest, *parts]), level + 1)
        return self._typed(schema, level)

    def _typed(self, schema: dict[str, Any], level: int) -> Any:
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = next((one for one in kind if one != "null"), "null")
        if kind == "object" or (kind is None and "properties" in schema):
            return self._object(schema, level)
        if kind == "array" or (kind is None and "items" in schema):
            return self._array(schema, level)
        if kind in ("integer", "number"):
            return _number(schema, whole=kind == "integer")
        if kind == "boolean":
            return False
        if kind == "null":
            return None
        return _text(schema)

    def _object(self, schema: dict[str, Any], level: int) -> dict[str, Any]:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        names = list(properties) if level < GENEROUS_LEVELS else []
        names += [name for name in required if name not in names]
        return {name: self.value(properties.get(name, True), level + 1) for name in names}

    def _array(self, schema: dict[str, Any], level: int) -> list[Any]:
        first = list(schema.get("prefixItems", []))
        count = max(schema.get("minItems", 0), 1 if level < GENEROUS_LEVELS else 0)
        count = min(max(count, len(first)), schema.get("maxItems", MAX_VALUES + 1))
        items = schema.get("items", True)
        return [
            self.value(first[at] if at < len(first) else items, level + 1) for at in range(count)
        ]

    def _target(self, reference: str) -> Any:
        """What a reference inside the schema points at; there are no others."""
        if not reference.startswith("#"):
            raise ValueError(reference)
        found = self._root
        for step in reference[1:].strip("/").split("/") if reference != "#" else []:
            name = step.replace("~1", "/").replace("~0", "~")
            found = found[int(name)] if isinstance(found, list) else found[name]
        return found


def _merged(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """One schema for several that hold together."""
    merged: dict[str, Any] = {}
    for schema in schemas:
        for name, part in schema.items():
            if name == "properties":
                merged[name] = {**merged.get(name, {}), **part}
            elif name == "required":
                merged[name] = [*merged.get(name, []), *part]
            else:
                merged[name] = part
    return merged


def _number(schema: dict[str, Any], *, whole: bool) -> int | float:
    """The number nearest to zero that fits; a bound that excludes itself is moved by one step."""
    step = schema.get("multipleOf", 1)
    low = schema.get("minimum")
    high = schema.get("maximum")
    if "exclusiveMinimum" in schema:
        low = schema["exclusiveMinimum"]
        low = floor(low / step) * step + step
    if "exclusiveMaximum" in schema:
        high = schema["exclusiveMaximum"]
        high = ceil(high / step) * step - step
    if low is not None and low > 0:
        found = low if not whole and "multipleOf" not in schema else ceil(low / step) * step
    elif high is not None and high < 0:
        found = high if not whole and "multipleOf" not in schema else floor(high / step) * step
    else:
        found = 0
    return int(found) if whole else found


def _text(schema: dict[str, Any]) -> str:
    text = _FORMATS.get(schema.get("format", ""), "mock")
    shortest = schema.get("minLength", 0)
    if shortest > MAX_TEXT:
        raise PermanentError(
            "response_format: the schema wants more text than the mock makes", type="too_large"
        )
    return text.ljust(shortest, ".")[: max(shortest, schema.get("maxLength", MAX_TEXT))]

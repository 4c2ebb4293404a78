"""A request's body: read within its bounds, then as strictly as a definition's file.

One reader for all calls, the core's: duplicate keys, NaN, lone surrogates, numbers beyond 64 bits
and deep nesting are refused, with their position. `RequestBody` declares the fields of a body once,
for reading it and for the OpenAPI document.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from fastapi import Header, Request

from dovetail.api.admission import brings_much, caller_of
from dovetail.api.problems import InvalidRequest, Refusal
from dovetail.api.service import ApiService
from dovetail.core.definition.source import Source, read_text
from dovetail.core.definition.validation import Checked
from dovetail.core.errors import InvalidDefinition, Path, Problem, Suggester, shown

T = TypeVar("T")

BODY_SECONDS = 30.0
"""A client that takes longer to send at most a megabyte holds a place that others want."""
SMALL_BYTES = 2 * 1024
"""Up to this, reading takes no longer than the rest of a request."""
LARGE_BYTES = 16 * 1024
"""Above this, reading takes long enough to delay other requests: it is done in a thread."""
MAX_UNKNOWN_FIELDS = 100
"""So many unknown fields are reported; a body can have 100,000."""

_FORMATS: dict[str, Literal["json", "yaml"]] = {
    "application/json": "json",
    "application/yaml": "yaml",
    "application/x-yaml": "yaml",
    "text/yaml": "yaml",
    "text/x-yaml": "yaml",
}


class BodyPart(Source):
    """One value of a body, as a source of its own that knows its place in the whole."""

    __slots__ = ("_at", "_whole")

    def __init__(self, whole: Source, key: str) -> None:
        super().__init__(whole.data[key], whole.name, whole.text)
        self._whole = whole
        self._at = key

    def position(self, path: Path, *, key: bool = False) -> tuple[int, int] | None:
        return self._whole.position((self._at, *path), key=key)


async def read_source(request: Request, here: ApiService, *, deeper: int = 0) -> Source:
    """The body as data with positions. Raises `Refusal`, or `InvalidDefinition` for its content.

    `deeper`: levels of nesting that the call itself puts around what the setting is about.
    """
    settings = here.settings
    text = await _read(request, settings.max_body_bytes)
    form = _format(request)
    depth = settings.max_nesting + deeper

    def read() -> Source:
        return read_text(text, format=form, max_bytes=settings.max_body_bytes, max_depth=depth)

    return await in_line(request, here, len(text), read)


async def in_line(
    request: Request, here: ApiService, size: int, work: Callable[[], T], *, goes_on: bool = False
) -> T:
    """Work on a body of this size, when it is the caller's turn. Raises `Overloaded`.

    `goes_on`: the body has had a turn before.
    """
    if size <= SMALL_BYTES:
        return work()
    line = here.aside if size > LARGE_BYTES else here.between
    return await line(work, caller_of(request), goes_on=goes_on)


async def check_definition(request: Request, here: ApiService, definition: Source) -> Checked:
    """In a thread, if it is large: other requests do not wait for it."""
    await here.commands.learn_handlers()
    size = len(definition.text or "")
    validate = here.commands.validate
    return await in_line(request, here, size, lambda: validate(definition), goes_on=True)


IdempotencyKey = Annotated[
    str | None,
    Header(description="the same key again gives the same answer, and makes nothing new"),
]


class BodyField(NamedTuple):
    """What a field of a body must be."""

    expected: str
    fits: Callable[[Any], bool]
    schema: Mapping[str, Any]
    """For the OpenAPI document."""
    required: bool = False


class Body(NamedTuple):
    """The fields of a request; a field that was not given, or is null, is None."""

    source: Source
    fields: dict[str, Any]


class RequestBody:
    """A body that is an object of these fields and no others: how it is read, and documented."""

    def __init__(
        self, name: str, fields: Mapping[str, BodyField], example: Any, *, deeper: int = 1
    ) -> None:
        """`name` is what generated clients call it; `deeper` as in `read_source`."""
        self._fields = fields
        self._deeper = deeper
        required = [name for name, field in fields.items() if field.required]
        schema = {
            "title": name,
            "type": "object",
            "properties": {name: field.schema for name, field in fields.items()},
            "required": required,
            "additionalProperties": False,
        }
        self.openapi = documented_body(schema, example, required=bool(required))
        """For `openapi_extra`."""

    async def read(self, request: Request, here: ApiService) -> Body:
        """No body at all is an empty object. Raises `InvalidRequest` with every problem."""
        return await _read_fields(request, here, self._fields, self._deeper)


def documented_body(
    schema: Mapping[str, Any], example: Any, *, required: bool = True
) -> dict[str, Any]:
    """For `openapi_extra`: a body that the endpoint reads itself, as JSON or YAML."""
    content = {
        "application/json": {"schema": schema, "example": example},
        "application/yaml": {"schema": schema},
    }
    return {"requestBody": {"required": required, "content": content}}


async def _read_fields(
    request: Request, here: ApiService, known: Mapping[str, BodyField], deeper: int
) -> Body:
    if not _has_body(request):
        source = Source({})
    else:
        try:
            source = await read_source(request, here, deeper=deeper)
        except InvalidDefinition as error:
            raise InvalidRequest(error.problems) from None
    data = source.data
    if not isinstance(data, dict):
        raise InvalidRequest(
            [_problem(source, (), f"the body must be an object, not {shown(data)}")]
        )
    problems = []
    suggester = Suggester()
    unknown = [name for name in data if name not in known]
    for name in unknown[:MAX_UNKNOWN_FIELDS]:
        hint = suggester.did_you_mean(name, known) or f"; known: {', '.join(known) or 'none'}"
        problems.append(_problem(source, (name,), f"unknown field {shown(name)}{hint}", True))
    if len(unknown) > MAX_UNKNOWN_FIELDS:
        message = f"and {len(unknown) - MAX_UNKNOWN_FIELDS:,} more unknown fields"
        problems.append(Problem("too_large", message, ""))
    for name, kind in known.items():
        value = data.get(name)
        if value is None:
            if kind.required:
                problems.append(_problem(source, (name,), f"is required: {kind.expected}"))
        elif not kind.fits(value):
            message = f"must be {kind.expected}, not {shown(value)}"
            problems.append(_problem(source, (name,), message))
    if problems:
        raise InvalidRequest(problems)
    return Body(source, {name: data.get(name) for name in known})


def _problem(source: Source, path: Path, message: str, on_key: bool = False) -> Problem:
    where = source.position(path, key=on_key) or (None, None)
    return Problem("invalid_field", message, str(path[0]) if path else "", *where)


# ── kinds of fields ──────────────────────────────────────────────────────────────────────


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


PARAMS = BodyField("any value", lambda value: True, {"type": ["object", "null"]})
"""The commands check params themselves, with all their problems."""
TEXT = BodyField("text", lambda value: isinstance(value, str), {"type": ["string", "null"]})
DEFINITION_SCHEMA = {"$ref": "#/components/schemas/Definition"}
DEFINITION = BodyField(
    "a definition", lambda value: isinstance(value, dict), DEFINITION_SCHEMA, required=True
)
OPTIONAL_DEFINITION = DEFINITION._replace(
    schema={"anyOf": [DEFINITION_SCHEMA, {"type": "null"}]}, required=False
)
FLAG = BodyField(
    "true or false", lambda value: isinstance(value, bool), {"type": ["boolean", "null"]}
)
VERSION = BodyField(
    "a version's number or alias",
    lambda value: is_whole(value) or isinstance(value, str),
    {"type": ["integer", "string", "null"], "description": "a number or an alias"},
)
NO_FIELDS = RequestBody("EmptyRequest", {}, {})


# ── bytes ────────────────────────────────────────────────────────────────────────────────


def _has_body(request: Request) -> bool:
    length = request.headers.get("content-length", "0")
    return length != "0" or "transfer-encoding" in request.headers


def _format(request: Request) -> Literal["json", "yaml"]:
    given = request.headers.get("content-type", "")
    kind, *parameters = (part.strip().lower() for part in given.split(";"))
    form = _FORMATS.get(kind) or ("json" if kind.endswith("+json") else None)
    charsets = [p.partition("=")[2].strip('" ') for p in parameters if p.startswith("charset")]
    if form is None or any(name not in ("utf-8", "utf8", "us-ascii") for name in charsets):
        what = shown(given) if given else "no Content-Type"
        raise Refusal(
            415, f"the body must be application/json or application/yaml in UTF-8, not {what}"
        )
    return form


async def _read(request: Request, most: int) -> bytes:
    """The whole body, and never more of it than is allowed."""
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Refusal(415, "the body must not be compressed")
    _format(request)  # before anything of it is read
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit():
        if len(length) > 18 or int(length) > most:
            raise _too_large(most)
        if int(length) > LARGE_BYTES:
            brings_much(request)  # before anything of it is kept
    pieces, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                size += len(piece)
                if size > most:
                    raise _too_large(most)
                if size > LARGE_BYTES:
                    brings_much(request)  # it may not have said how much it is
                pieces.append(piece)
    except TimeoutError:
        raise Refusal(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
    return b"".join(pieces)


def _too_large(most: int) -> Refusal:
    # The connection stays open: closed with unread bytes, it could take the answer with it.
    return Refusal(413, f"the body has more than {most:,} bytes")

"""The model of a workflow definition: the fields of the contract, their types, bounds and defaults.

The models are strict (no "30" for 30, no true for 1), refuse unknown fields, take null as
"not given", and make the JSON Schema for editors. `validation` checks what concerns more than one
part: ids, dependencies, templates.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
)
from pydantic_core import PydanticCustomError, PydanticUseDefault

from dovetail.core.items import MAX_ITEMS

DEFAULT_TIMEOUT_SECONDS = 300.0
DEFAULT_WINDOW, MAX_WINDOW = 100, 10_000
"""Items of a mapped node that may be under way at once. A larger window counts as the largest: a
stop or a cancel touches all of them in one step."""
# Ten years: a longer duration is a mistake, and arithmetic with it could overflow.
MAX_SECONDS = 315_360_000.0
MAX_RETRIES = 1000

# The names a template knows besides nodes, and the words of its language.
TEMPLATE_ROOTS = ("params", "run", "secrets")
RESERVED_IDS = frozenset(
    [*TEMPLATE_ROOTS, "true", "false", "none", "and", "or", "not", "in", "is", "if", "else"]
) | {"True", "False", "None"}  # constants in Jinja too, so no template could read such a node


def _default_if_null(value: Any) -> Any:
    if value is None:
        raise PydanticUseDefault
    return value


def _not_reserved(node_id: str) -> str:
    if node_id in RESERVED_IDS:
        message = "'{id}' is reserved in templates and cannot be a node's id; try '{id}_node'"
        raise PydanticCustomError("reserved_id", message, {"id": node_id})
    return node_id


def _text_or_bool(value: Any) -> Any:
    if isinstance(value, str | bool):
        return value
    message = "must be a template such as \"{{ params.topic != '' }}\", or true or false"
    raise PydanticCustomError("condition_type", message)


def _list_or_text(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_ITEMS:
        message = "has {count} items; at most {most} are allowed"
        about = {"count": f"{len(value):,}", "most": f"{MAX_ITEMS:,}"}
        raise PydanticCustomError("too_many_items", message, about)
    if isinstance(value, str | list):
        return value
    message = 'must be a template such as "{{ fetch.json.items }}", or a list'
    raise PydanticCustomError("items_type", message)


def _number_or_share(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and _SHARE.fullmatch(value) and float(value[:-1]) <= 100:
        return value
    message = 'must be a whole number from 0, or a share such as "5%"'
    raise PydanticCustomError("max_failures_type", message)


SHARE = r"[0-9]{1,3}(\.[0-9]{1,6})?%"
_SHARE = re.compile(SHARE)


def _with_items(value: Any) -> Any:
    """`for_each: X` is short for `for_each: {items: X}`."""
    if isinstance(value, str | list):
        # Checked here too: below, an error would be about an `items` that is not written.
        return {"items": _list_or_text(value)}
    if isinstance(value, dict | ForEach | None):
        return value
    message = 'must be a template such as "{{ fetch.json.items }}", a list, or a mapping with items'
    raise PydanticCustomError("for_each_type", message)


_NULL = {"type": "null"}


def _for_editors(schema: dict[str, Any]) -> None:
    """Keep in the generated schema only what a person needs while typing."""
    schema.pop("title", None)
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        field.pop("title", None)
        if field.get("default", ...) is None:
            del field["default"]  # null means "not given"; the description names the default
        if name in required:
            continue
        choices = field.pop("anyOf", None) or [_without_words(field)]
        if _NULL not in choices:
            choices.append(_NULL)
        simple = len(choices) == 2 and "type" in choices[0] and "enum" not in choices[0]
        if simple:
            field.update(choices[0], type=[choices[0]["type"], "null"])
        else:
            field["anyOf"] = choices
    if "for_each" in schema["properties"]:
        short = [{"type": "string"}, {"type": "array", "items": {}, "maxItems": MAX_ITEMS}]
        schema["properties"]["for_each"]["anyOf"][:0] = short
    if "dependencies" in schema["properties"]:
        alias = dict(schema["properties"]["dependencies"])
        alias.pop("default", None)  # a generated client would send it, beside `dependencies`
        alias["description"] = "Another name for `dependencies`; give only one of the two."
        schema["properties"]["depends_on"] = alias
        given = {name: {"type": "array"} for name in ("dependencies", "depends_on")}
        schema["not"] = {"required": [*given], "properties": given}


def _without_words(field: dict[str, Any]) -> dict[str, Any]:
    """Take the constraints out of a field's schema; the descriptions stay."""
    words = ("description", "examples", "default")
    return {key: field.pop(key) for key in list(field) if key not in words}


Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
Delay = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
Retries = Annotated[int, Field(ge=0, le=MAX_RETRIES)]
MAX_LABEL_CHARS = 200
Label = Annotated[str, Field(min_length=1, max_length=MAX_LABEL_CHARS)]
NodeId = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"), AfterValidator(_not_reserved)]
OrDefault = BeforeValidator(_default_if_null)


class _Part(BaseModel):
    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        json_schema_extra=_for_editors,
    )


class RetrySettings(_Part):
    """How long to wait before a failed node is tried again."""

    base_delay_seconds: Delay | None = Field(None, examples=[10])
    """Wait before the first retry; doubled for each further one. Default: 10."""
    max_delay_seconds: Delay | None = Field(None, examples=[300])
    """The longest wait. Default: 300."""
    jitter: Annotated[float, Field(ge=0, le=10)] | None = Field(None, examples=[0.5])
    """Up to this share of the wait is added by chance. Default: 0.5."""


class Cache(_Part):
    """Keep a node's output: the same handler with the same rendered config is not run again."""

    ttl_seconds: Seconds = Field(examples=[86400])
    """How long a stored output is used."""


class ForEach(_Part):
    """Run the handler once for each item of a list. The output is the list of the outputs."""

    items: Annotated[
        str | list[Any],
        BeforeValidator(_list_or_text),
        Field(json_schema_extra={"maxItems": MAX_ITEMS}),
    ] = Field(examples=["{{ fetch.json.items }}"])
    """The list: a template, or the items themselves. `item` and `index` are one of them and its
    number, in the config of this node."""
    max_concurrency: Annotated[int, Field(ge=1), OrDefault] = Field(DEFAULT_WINDOW, examples=[20])
    """How many items may be under way at once. Default: 100. At most 10,000 are."""
    max_failures: Annotated[
        Annotated[int, Field(ge=0)] | Annotated[str, Field(pattern=f"^{SHARE}$")],
        BeforeValidator(_number_or_share),
        OrDefault,
    ] = Field(0, examples=[3, "5%"])
    """How many items may fail, or which share of them. Their places in the output are null. With
    one more the node fails. Default: 0."""


class Defaults(_Part):
    """What every node gets that does not say otherwise."""

    timeout_seconds: Seconds | None = Field(None, examples=[60])
    """The time one attempt may take. Default: 300."""
    max_retries: Retries | None = Field(None, examples=[3])
    """How often a failed node is tried again. Default: the handler's own."""
    retry: RetrySettings | None = None
    """How long to wait before a failed node is tried again."""
    resource_tag: Label | None = Field(None, examples=["search_api"])
    """The rate-limit group."""


class Node(_Part):
    """One step of a workflow."""

    id: NodeId = Field(
        examples=["fetch"], json_schema_extra={"not": {"enum": [*sorted(RESERVED_IDS)]}}
    )
    """Unique in the workflow; templates of later nodes read its output by this name."""
    handler: Label = Field(examples=["call_external_service", "llm_service", "input", "output"])
    """What the node runs. `dovetail handlers` lists those known here."""
    dependencies: Annotated[list[str], OrDefault] = Field(
        default_factory=list,
        validation_alias=AliasChoices("dependencies", "depends_on"),
        examples=[["start"]],
    )
    """The ids of the nodes that must be done before this one starts."""
    config: Annotated[dict[str, Any], OrDefault] = Field(
        default_factory=dict, examples=[{"prompt": "Summarise: {{ fetch.body }}"}]
    )
    """What the handler is given. Any text in it may be a template. A secret, as in
    `Bearer {{ secrets.KEY }}`, may stand where the handler takes one."""
    timeout_seconds: Seconds | None = Field(None, examples=[30])
    """The time one attempt may take; a timeout is retried like any failure. Default: 300."""
    max_retries: Retries | None = Field(None, examples=[3])
    """How often the node is tried again when it fails. Default: the handler's own."""
    retry: RetrySettings | None = None
    """How long to wait before a failed node is tried again."""
    cache: Cache | None = None
    """Keep the output and use it again. Default: not kept."""
    condition: Annotated[bool | str, BeforeValidator(_text_or_bool)] | None = Field(
        None, examples=["{{ params.topic != '' }}"]
    )
    """A template; if it is false, the node is skipped."""
    resource_tag: Label | None = Field(None, examples=["search_api"])
    """The rate-limit group. A tag nobody configured allows 10 starts per second."""
    delivery: Annotated[Literal["at_least_once", "at_most_once"], OrDefault] = "at_least_once"
    """`at_most_once`: start it once and never again by itself; implies `max_retries: 0`."""
    allow_failure: Annotated[bool, OrDefault] = False
    """If the node fails for good, the run goes on, and the nodes after it start."""
    for_each: Annotated[ForEach, BeforeValidator(_with_items)] | None = Field(
        None, examples=["{{ fetch.json.items }}"]
    )
    """Run the handler once for each item of this list: a template, a list, or a mapping with
    `items`, `max_concurrency` and `max_failures`."""


RunEnd = Literal["completed", "failed", "cancelled"]
RUN_ENDS: tuple[RunEnd, ...] = get_args(RunEnd)
MAX_WEBHOOKS = 20

STORED = {"stored": True}
"""The validation context of a definition that was accepted before: a rule that became stricter
since must not make its runs unreadable."""


def _http_url(url: str, info: ValidationInfo) -> str:
    if info.context is not None and "stored" in info.context:
        return url
    if "{{" in url or " " in url:
        raise PydanticCustomError("webhook_url", "must be one URL; templates are not rendered here")
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port or an IPv6 address that is none
        has_host = False
    is_plain = url.isprintable() and "\\" not in url
    if not url.startswith(("http://", "https://")) or not has_host or not is_plain:
        raise PydanticCustomError("webhook_url", "must be as in https://example.com/hook")
    return url


class Webhook(_Part):
    """A URL that gets a signed message when a run ends."""

    url: Annotated[str, Field(max_length=2000), AfterValidator(_http_url)] = Field(
        examples=["https://example.com/hook"]
    )
    """Where the message is sent with POST."""
    on: Annotated[list[RunEnd], Field(min_length=1), OrDefault] = Field(
        default_factory=lambda: list(RUN_ENDS), examples=[["failed"]]
    )
    """The ends that it gets. Default: all of them."""
    secret: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = Field(
        None, examples=["HOOK"]
    )
    """`NAME` of the variable `DOVETAIL_SECRET_<NAME>`, a key that signs the message. Default: not
    signed."""


class Workflow(_Part):
    """A Dovetail workflow: nodes, what each runs, and what each depends on."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")] = Field(
        examples=["summarise"]
    )
    """What the workflow is registered and triggered as."""
    description: str | None = None
    """What it is for, in your words."""
    on_failure: Annotated[Literal["fail_fast", "continue"], OrDefault] = "fail_fast"
    """`fail_fast`: stop the run when a node fails; `continue`: finish the other branches."""
    max_concurrency: Annotated[int, Field(ge=1)] | None = Field(None, examples=[4])
    """How many nodes of one run may run at once. Default: no limit."""
    params: dict[str, Any] | None = Field(
        None,
        examples=[
            {
                "type": "object",
                "required": ["topic"],
                "properties": {"topic": {"type": "string"}},
            }
        ],
    )
    """A JSON Schema (2020-12) for the params of a run; defaults in it are applied."""
    defaults: Defaults | None = None
    """What every node gets that does not say otherwise."""
    notify: Annotated[list[Webhook], Field(max_length=MAX_WEBHOOKS), OrDefault] = Field(
        default_factory=list
    )
    """Webhooks: who is notified when a run ends."""
    # An empty list is a finding of its own, `empty_graph`, so the model itself lets it pass.
    nodes: list[Node] = Field(json_schema_extra={"minItems": 1})
    """The steps, in any order; ready ones are started in this order."""


def definition_schema() -> dict[str, Any]:
    """The JSON Schema of a definition, for editors."""
    schema = Workflow.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Dovetail workflow",
        **schema,
    }

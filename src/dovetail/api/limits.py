"""`/rate-limits`: how often nodes of a resource tag may start, for all workers together."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.convertors import Convertor, register_url_convertor
from starlette.responses import Response

from dovetail.api import schemas
from dovetail.api.answers import Here, fields_of, json_answer
from dovetail.api.bodies import Field, is_number, is_whole, read_fields
from dovetail.engine.limits import FASTEST, LARGEST_BURST, SLOWEST

router = APIRouter(prefix="/rate-limits", tags=["rate limits"])

_LIMIT = {
    "rate_per_second": Field(
        f"a number above 0 ({SLOWEST:g} to {FASTEST:g})",
        lambda value: is_number(value) and SLOWEST <= value <= FASTEST,
        required=True,
    ),
    "burst": Field(
        f"a whole number of at least 1 (at most {LARGEST_BURST:,})",
        lambda value: is_whole(value) and 1 <= value <= LARGEST_BURST,
    ),
}


class _Whole(Convertor[str]):
    """The rest of a path, whatever it is: a `resource_tag` may have slashes, encoded or not."""

    regex = r"[\s\S]+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("whole", _Whole())


@router.get("", summary="The limits that are set", response_model=schemas.RateLimits)
async def rate_limits(here: Here) -> Response:
    return json_answer(await here.commands.rate_limits())


@router.get("/{tag:whole}", summary="The limit of a tag", response_model=schemas.RateLimit)
async def rate_limit(tag: str, here: Here) -> Response:
    return json_answer(await here.commands.rate_limit(tag))


@router.put(
    "/{tag:whole}",
    summary="Set the limit of a tag",
    response_model=schemas.RateLimit,
    openapi_extra=fields_of(
        {
            "rate_per_second": {"type": "number", "exclusiveMinimum": 0, "maximum": FASTEST},
            "burst": {"type": ["integer", "null"], "minimum": 1, "maximum": LARGEST_BURST},
        },
        ("rate_per_second",),
    ),
)
async def set_rate_limit(tag: str, request: Request, here: Here) -> Response:
    rate, burst = (await read_fields(request, here, _LIMIT)).fields.values()
    return json_answer(await here.commands.set_rate_limit(tag, float(rate), burst or 1))

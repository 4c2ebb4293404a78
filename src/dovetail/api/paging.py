"""Pages of a list: how many, and from where on. One wording for every list."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

MOST = 1000

Limit = Annotated[
    int, Query(ge=1, description=f"items of one page; more than {MOST:,} are {MOST:,}")
]
Cursor = Annotated[
    str | None, Query(description="`next_cursor` of the page before; without it the first page")
]


def page_size(limit: int) -> int:
    return min(limit, MOST)

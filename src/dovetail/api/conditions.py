"""`ETag`, `If-Match`, `If-None-Match`: what a client has seen, and whether it is still so.

What it must not know: what is seen.
"""

from __future__ import annotations

import re
from hashlib import blake2b

from fastapi import Request

COMPRESSED = "-gzip"
"""Ends the tag of a compressed answer: its bytes are others, what it says is not."""
_TAG = re.compile(r'(W/)?"([\x21\x23-\x7e\x80-\xff]*)"')


def tag_of(body: bytes) -> str:
    """Of an answer, so that the same answer has the same."""
    return f'"{blake2b(body, digest_size=12).hexdigest()}"'


def names(request: Request, header: str, tag: str | None, *, weak: bool = False) -> bool | None:
    """Whether the header names this tag; None if it was not sent.

    `*` names whatever there is, and nothing names what is not there (a tag of None). A tag that
    only says "much the same" (`W/`) counts where that is good enough.
    """
    sent = request.headers.getlist(header)
    if not sent:
        return None
    text = ", ".join(sent)
    if tag is None or text.strip() == "*":
        return tag is not None
    found = {
        value.removesuffix(COMPRESSED) for mark, value in _TAG.findall(text) if weak or not mark
    }
    return tag.strip('"') in found

"""Two handlers for custom_handler.yaml, loaded with `--handlers examples/handlers/text_tools.py`.

A handler takes the node's rendered config and a context, and returns a JSON value. It stays a
plain function, so a test can call it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from dovetail import Context, PermanentError, RetryableError, handler


class CountConfig(BaseModel):
    """Checked when the node runs. A wrong config fails the node at once and names the fields."""

    model_config = ConfigDict(extra="forbid")

    text: str
    most_common: int = Field(default=3, ge=1, le=100)


@handler("count_words")
def count_words(config: CountConfig, ctx: Context) -> dict[str, Any]:
    """Count words. A plain def may block: it runs in a thread."""
    words = config.text.lower().replace(",", "").split()
    if not words:
        # A retry would not help.
        raise PermanentError("there is no word in the text", type="empty_text")
    counts: Counter[str] = Counter()
    for done, word in enumerate(words, 1):
        if ctx.cancelled.is_set():  # the run was cancelled or the node timed out: stop
            break
        counts[word] += 1
        ctx.progress(done / len(words), f"{done} of {len(words)}")
    ctx.log.info("counted %d words", len(words))
    return {"words": len(words), "most_common": counts.most_common(config.most_common)}


@handler("publish", max_retries=3)
async def publish(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
    """Simulate a call to a service that is down at the first attempt."""
    if ctx.attempt == 1:
        raise RetryableError("the service is down")  # `after=5` would set the delay
    # Every attempt has the same key: a service can distinguish a repeat from a second order.
    return {
        "sent": config["counted"]["words"],
        "attempt": ctx.attempt,
        "key": ctx.idempotency_key,
    }

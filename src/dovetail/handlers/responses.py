"""What an HTTP response means for a node (success, retry or failure), and its text.

Shared by the handlers that use HTTP.
"""

from __future__ import annotations

import re
import time
from base64 import b64encode
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from http import HTTPStatus

from dovetail.core.errors import PermanentError, RetryableError

MAX_RETRY_AFTER = 3600.0
SHOWN_OF_A_FAILURE = 300

_SECONDS = re.compile(r"\d{1,18}(\.\d{1,18})?", re.ASCII)
_CHARSET = re.compile(r"charset\s*=\s*[\"']?([a-z0-9._-]+)")
# Python also has codecs that are no charsets, and some that take quadratic time (punycode, idna).
_TEXT_CHARSET = re.compile(
    r"utf-?(8|16|32)([-_]?[lb]e)?|(us-)?ascii|latin-?1|iso[-_]?8859[-_]\d+|(cp|windows-)\d+"
    r"|koi8-[rut]|shift[-_]jis|euc[-_](jp|kr)|gb(2312|k|18030)|big5"
)
_TEXT_TYPE = re.compile(r"text/|[^;]*[/+](json|xml|javascript|yaml|x-www-form-urlencoded)\b")


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A response. Header names are lower case; `where` is the request, as it may be shown.

    `complete` is false if reading stopped at the size limit.
    """

    status_code: int
    headers: dict[str, str]
    content: bytes
    where: str
    complete: bool = True


def check_status(
    answer: HttpResponse,
    expected: Collection[int] | None = None,
    *,
    redact: Callable[[str], str],
) -> None:
    """Return if the answer is a success, else raise the right error.

    The error quotes the beginning of the answer. Services may quote a key that they refuse, so the
    answer is redacted before it is cut: the beginning of a cut secret would stay.
    """
    status = answer.status_code
    if status in expected if expected else 200 <= status < 300:
        return
    message = f"{answer.where} answered {status}{_phrase(status)}"
    if expected:
        message += f", expected {' or '.join(map(str, expected))}"
    text, is_text = decoded(answer)
    beginning = " ".join(redact(text)[: 4 * SHOWN_OF_A_FAILURE].split())[:SHOWN_OF_A_FAILURE]
    if beginning and is_text:
        message += f": {beginning}"
    kind = f"http_{status}"
    if status == HTTPStatus.TOO_MANY_REQUESTS or 500 <= status < 600:
        asked = retry_after(answer.headers, time.time())
        raise RetryableError(message, at_least=asked, type=kind)
    raise PermanentError(message, type=kind)


def check_complete(answer: HttpResponse, max_bytes: int) -> None:
    """Raise if only the beginning of the answer was read."""
    if not answer.complete:
        raise PermanentError(
            f"{answer.where}: the answer is larger than {max_bytes} bytes, "
            "which is all that an output may have",
            type="too_large",
        )


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """The seconds of `Retry-After`, at most an hour; None if it has no usable value."""
    text = headers.get("retry-after", "").strip()
    if _SECONDS.fullmatch(text):
        return min(float(text), MAX_RETRY_AFTER)
    until = _timestamp(text)
    if until is None:
        return None
    # By the service's own clock if it sends one: ours may differ.
    start = _timestamp(headers.get("date", ""))
    return min(max(0.0, until - (now if start is None else start)), MAX_RETRY_AFTER)


def decoded(answer: HttpResponse) -> tuple[str, bool]:
    """The body as text and True; as base64 and False if text would destroy it."""
    kind = answer.headers.get("content-type", "").lower()
    declared = _CHARSET.search(kind)
    charset = declared[1] if declared and _TEXT_CHARSET.fullmatch(declared[1]) else ""
    if charset or _TEXT_TYPE.match(kind):
        try:
            return answer.content.decode(charset or "utf-8", "replace"), True
        except LookupError:  # Python has no charset of that name
            return answer.content.decode("utf-8", "replace"), True
    try:
        text = answer.content.decode()
    except UnicodeDecodeError:
        return b64encode(answer.content).decode(), False
    return (b64encode(answer.content).decode(), False) if "\0" in text else (text, True)


def _phrase(status: int) -> str:
    try:
        return f" {HTTPStatus(status).phrase}"
    except ValueError:
        return ""


def _timestamp(text: str) -> float | None:
    if not text or len(text) > 64:
        return None
    try:
        moment = parsedate_to_datetime(text)
        # A date without a zone (-0000) is UTC in HTTP, not the zone of this machine.
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None

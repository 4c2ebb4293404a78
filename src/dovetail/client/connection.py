"""Calls to a server: sent, repeated where that is safe, and answered with data or an error.

A call that changes nothing, or that has an idempotency key, is repeated for a while when the
connection breaks or the server is busy. Any other call is repeated only if the server cannot have
seen it. Imported on first use: httpx2 is the extra `http` and takes a third of a second.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from ipaddress import ip_address
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlsplit

import httpx2
import orjson

from dovetail.client.arguments import no_address, server_url
from dovetail.config import env_name
from dovetail.core.errors import (
    ArchiveDown,
    BrokenRecord,
    BrokenRun,
    Changed,
    Conflict,
    DovetailError,
    Expired,
    InvalidDefinition,
    InvalidParams,
    NotFound,
    Problem,
    StoreError,
    StoreLost,
    one_line,
)
from dovetail.engine.idempotency import MAX_KEY_LENGTH, check_key

FIRST_SECONDS = 3.0
"""So long is a server looked for that has never answered: the address may be wrong."""
AWAY_SECONDS = 60.0
"""So long one may be away that has: it is being started again."""
BUSY_SECONDS = 15.0
"""So long a server may answer that it is too busy, or has lost its store."""
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0
SILENCE_SECONDS = 45.0
"""Of a stream of events, whose server says every 15 s that it is still there."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 3.0
IDLE_SECONDS = 4.0
"""An idle connection is given up a little before the server would."""

_BUSY = frozenset({429, 502, 503, 504})
_NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError)
_PLAIN = re.compile(r"[!-~]([ -~]*[!-~])?")
T = TypeVar("T")
Query = Mapping[str, str | int | float | None]
StreamedEvent = tuple[str, dict[str, Any] | None]
"""An id, and the event that has it; None for the id after which a stream begins."""


class ServerUnreachable(StoreError):
    """The server does not answer. What it had answered before is not lost."""

    type = "unreachable"


class ServerConnection:
    """To one server. For use as `async with`."""

    def __init__(self, url: str, token: str | None) -> None:
        """Raises `DovetailError` for what is no address, or no token."""
        self.url = server_url(url)
        try:
            httpx2.URL(self.url)
        except (httpx2.InvalidURL, ValueError):
            raise no_address() from None
        headers = {"User-Agent": "dovetail"}
        if token:
            if not (token.isascii() and token.isprintable()):
                raise DovetailError("the token has characters that no header can carry")
            headers["Authorization"] = f"Bearer {token}"
        self._http = httpx2.AsyncClient(
            headers=headers,
            # Each wait holds a connection; how many there may be is the server's to say.
            limits=httpx2.Limits(
                max_connections=None, max_keepalive_connections=20, keepalive_expiry=IDLE_SECONDS
            ),
            follow_redirects=False,
            # The certificates of this machine take a tenth of a second to read.
            verify=self.url.startswith("https:"),
            trust_env=not _is_loopback(self.url),
        )
        self._answered = False
        self._closed = False
        self._under_way: set[asyncio.Future[Any]] = set()

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closed = True
        # First what is under way: a connection that is just being made would be left open.
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        await self._http.__aexit__(kind, error, traceback)

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: bytes | None = None,
        form: str = "application/json",
        repeatable: bool = False,
        waits: float = 0.0,
    ) -> Any:
        """What the server answers, from JSON. Raises what it refused, or `ServerUnreachable`.

        All but a POST may be repeated anyway. `waits` is how long the server is asked to wait.
        """
        return self._data(
            await self._send(method, path, query, body, form, None, repeatable, waits)
        )

    async def made(self, path: str, body: bytes, key: str) -> tuple[dict[str, Any], int]:
        """The run or batch of a POST under this key, and the status: 200 if it was made earlier."""
        answer = await self._send("POST", path, None, body, "application/json", key, True, 0.0)
        return dict(self._data(answer)), answer.status_code

    async def _send(
        self,
        method: str,
        path: str,
        query: Query | None,
        body: bytes | None,
        form: str,
        key: str | None,
        repeatable: bool,
        waits: float,
    ) -> httpx2.Response:
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = form
        if key is not None:
            headers["Idempotency-Key"] = _key_header(key)
        repeatable = repeatable or method != "POST"
        tries = _Tries(self)
        while True:
            try:
                answer = await self._unless_closed(
                    self._http.request(
                        method,
                        f"{self.url}{path}",
                        params=_given(query),
                        content=body,
                        headers=headers,
                        timeout=_timeout(ANSWER_SECONDS + waits),
                    )
                )
            except httpx2.RequestError as error:
                if not repeatable and not isinstance(error, _NEVER_SENT):
                    raise self._unknown(method, path, error) from None
                await tries.unreachable(error)
                continue
            except httpx2.InvalidURL:
                raise _too_long() from None
            self._answered = True
            if answer.is_success:
                return answer
            if method == "DELETE" and answer.status_code == 404 and tries.broken:
                return httpx2.Response(204)  # an earlier try, whose answer was lost, did it
            refused = error_of(answer.status_code, answer.headers, answer.content, self.url)
            if answer.status_code == 429 or (answer.status_code in _BUSY and repeatable):
                await tries.busy(refused, answer.headers.get("retry-after"))
                continue
            raise refused

    async def events(
        self, path: str, after: int, query: Query | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """Every event, or line of a log, after that number, once and in order; ends with the
        run's last.

        A connection that breaks is made again from where it broke.
        """
        last = after
        known: dict[str, Any] | None = None

        def asked(resumes: bool) -> tuple[Query, str | None]:
            return {**(query or {}), "after": last}, str(last) if resumes else None

        async with aclosing(self._streamed(path, asked)) as frames:
            async for _, event in frames:
                # A log may have two lines of one number: the later says what is missing.
                if event is not None and event["seq"] >= last and event != known:
                    last, known = event["seq"], event
                    yield event

    async def feed(self, path: str, after: str | None) -> AsyncIterator[dict[str, Any]]:
        """Every event after that id, or from now on, once and in order, for ever; each with its
        `id`. A connection that breaks is made again from where it broke."""
        last = after

        def asked(_: bool) -> tuple[Query, str | None]:
            return {}, last

        async with aclosing(self._streamed(path, asked)) as frames:
            async for last, event in frames:
                if event is not None:
                    yield {"id": last, **event}

    async def _streamed(
        self, path: str, asked: Callable[[bool], tuple[Query, str | None]]
    ) -> AsyncGenerator[StreamedEvent]:
        """What comes over one connection after the other. `asked` has the query and the
        `Last-Event-ID` of the next one, and is given whether there was one before."""
        resumes, quiet = False, 0
        tries = _Tries(self)
        while True:
            query, last_id = asked(resumes)
            headers = {"Accept": "text/event-stream"}
            if last_id is not None:
                headers["Last-Event-ID"] = last_id
            came = False
            try:
                feed = self._feed(path, headers, query, tries)
                async with aclosing(feed):
                    while (frame := await self._unless_closed(anext(feed, None))) is not None:
                        came = came or frame[1] is not None
                        yield frame
            except _Over:
                return
            except _RefusedAnswer as refused:
                if refused.status not in _BUSY:
                    raise refused.error from None
                await tries.busy(refused.error, refused.retry_after)
                continue
            except httpx2.RequestError as error:
                await tries.unreachable(error)
            except httpx2.InvalidURL:
                raise _too_long() from None
            # An orderly end is that of the run or of the server: the next connection shows which.
            resumes = True
            quiet = 0 if came else quiet + 1
            if quiet:
                await asyncio.sleep(_pause(quiet))

    async def _feed(
        self, path: str, headers: Mapping[str, str], query: Query, tries: _Tries
    ) -> AsyncGenerator[StreamedEvent]:
        """What comes over one connection. Raises `_Over` if there is nothing to come."""
        async with self._http.stream(
            "GET",
            f"{self.url}{path}",
            params=_given(query),
            headers=headers,
            timeout=_timeout(SILENCE_SECONDS),
        ) as answer:
            self._answered = True
            if answer.status_code == 204:
                raise _Over
            if answer.status_code != 200:
                raise _RefusedAnswer(answer, await answer.aread(), self.url)
            tries.forget()
            if (start := answer.headers.get("last-event-id")) is not None:
                yield start, None
            async for frame in httpx2.EventSource(answer, max_event_size=None):
                yield frame.id, self._event(frame.data)

    async def _unless_closed(self, work: Awaitable[T]) -> T:
        doing = asyncio.ensure_future(work)
        self._under_way.add(doing)
        try:
            return await doing
        except asyncio.CancelledError:
            if self._closed and doing.cancelled() and not _is_cancelled():
                raise StoreError(f"the connection to {self.url} was closed meanwhile") from None
            raise
        finally:
            self._under_way.discard(doing)

    def _data(self, answer: httpx2.Response) -> Any:
        if answer.status_code == 204:
            return None
        try:
            return orjson.loads(answer.content)
        except orjson.JSONDecodeError:
            raise error_of(answer.status_code, answer.headers, answer.content, self.url) from None

    def _event(self, data: str) -> dict[str, Any]:
        try:
            event = orjson.loads(data)
            int(event["seq"])
        except (orjson.JSONDecodeError, TypeError, KeyError, ValueError):
            raise NoDovetail(
                f"{self.url} sends what is no event of a run, and no line of its log"
            ) from None
        return dict(event)

    def _unknown(self, method: str, path: str, error: httpx2.RequestError) -> ServerUnreachable:
        return ServerUnreachable(
            f"{self.url}: the connection broke ({_words(error)}) before {method} {path} was "
            "answered; whether it was done is not known: look before you ask again"
        )


class _Over(Exception):
    """The last event was sent before."""


class _RefusedAnswer(Exception):
    """Out of a stream, where an answer is read piece by piece."""

    def __init__(self, answer: httpx2.Response, content: bytes, url: str) -> None:
        self.status = answer.status_code
        self.retry_after = answer.headers.get("retry-after")
        self.error = error_of(answer.status_code, answer.headers, content, url)


class _Tries:
    """How often a call was tried since it last worked, and whether it is worth another."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection
        self.broken = False
        """A try may have been seen by the server though it was not answered."""
        self.forget()

    def forget(self) -> None:
        """It has worked."""
        self._count = 0
        self._began: float | None = None

    async def unreachable(self, error: httpx2.RequestError) -> None:
        """Returns when it is time for another try. Raises `ServerUnreachable` if there is none."""
        url, known = self._connection.url, self._connection._answered
        self.broken = self.broken or not isinstance(error, _NEVER_SENT)
        if not await self._next(AWAY_SECONDS if known else FIRST_SECONDS, _pause(self._count + 1)):
            times = "once" if self._count == 1 else f"{self._count} times"
            hint = "is it being started?" if known else "is it running, as in  dovetail serve?"
            raise ServerUnreachable(
                f"the server at {url} cannot be reached: {_words(error)}; tried {times} within "
                f"{self._passed:.0f} s; {hint}"
            ) from None

    async def busy(self, refused: DovetailError, retry_after: str | None) -> None:
        """Returns when it is time for another try. Raises what was refused if there is none."""
        pause = _pause(self._count + 1)
        if retry_after is not None and retry_after.isascii() and retry_after.isdigit():
            pause = float(retry_after[:6]) + pause / 2  # not all clients at the same moment
        if not await self._next(BUSY_SECONDS, pause):
            raise refused

    async def _next(self, patience: float, pause: float) -> bool:
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        self._count += 1
        self._passed = now - self._began
        if self._passed + pause > patience:
            return False
        await asyncio.sleep(pause)
        return True


def _key_header(key: str) -> str:
    """An idempotency key as a header can carry it. Raises `InvalidParams` for what is no key."""
    check_key(key)
    if _PLAIN.fullmatch(key):
        return key
    quoted = quote(key, safe="")
    if len(quoted) <= MAX_KEY_LENGTH:
        return quoted
    # 255 characters of another script are up to 3,060 when they are quoted, and the server takes
    # 255: the digest stands for them, always the same one.
    return hashlib.sha256(key.encode()).hexdigest()


def _too_long() -> InvalidParams:
    """httpx2 takes an address of at most 64 KiB; all else that it could refuse is quoted."""
    return InvalidParams([Problem("too_large", "the values are too long for an address", "")])


def _pause(count: int) -> float:
    longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(count - 1, 20))
    return longest * random.uniform(0.5, 1.0)  # noqa: S311  (so that clients do not march in step)


def _timeout(seconds: float) -> httpx2.Timeout:
    return httpx2.Timeout(seconds, connect=CONNECT_SECONDS, pool=None)


def _is_cancelled() -> bool:
    """The caller is cancelled, rather than its request."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _words(error: httpx2.RequestError) -> str:
    if isinstance(error, httpx2.ConnectTimeout | httpx2.ReadTimeout):
        return "no answer in time"
    return str(error) or type(error).__name__


def _given(query: Query | None) -> dict[str, str | int | float] | None:
    return {name: value for name, value in (query or {}).items() if value is not None} or None


def _is_loopback(url: str) -> bool:
    """No proxy of the environment leads there."""
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


# --- refusals of the server, as the errors that the embedded engine would have raised ------------

PROBLEM = "application/problem+json"
HOW_TO_GIVE_A_TOKEN = f"give it with token=…, --token or {env_name('token')}"
_MAX_DETAIL_LENGTH = 2_000


class AccessDenied(DovetailError):
    """The server wants a token, does not know this one, or does not let it do that."""

    type = "access_denied"


class ServerError(DovetailError):
    """The server could not, and it is not the caller's fault."""

    type = "server_error"


class NoDovetail(ServerError):
    """Something answers there, but not as Dovetail does."""

    type = "no_dovetail"


_BY_WORDS: dict[str, Callable[[str], DovetailError]] = {
    "not_found": NotFound,
    "conflict": Conflict,
    "expired": Expired,
    "precondition_failed": Changed,
    "run_damaged": BrokenRun,
    "record_damaged": BrokenRecord,
    "store_error": StoreError,
    "store_lost": StoreLost,
    "archive_down": ArchiveDown,
}
_BY_FINDINGS: dict[str, type[InvalidDefinition]] = {
    "invalid_definition": InvalidDefinition,
    "invalid_params": InvalidParams,
    "invalid_request": InvalidParams,
}


def error_of(status: int, headers: Mapping[str, str], content: bytes, url: str) -> DovetailError:
    """The error for an answer that is none; `url` is the server's."""
    problem = _problem(headers, content)
    if problem is None:
        return _not_ours(status, headers, url)
    detail = one_line(str(problem.get("detail", "")), _MAX_DETAIL_LENGTH)
    if status == 401:
        return AccessDenied(f"{url}: {detail}; {HOW_TO_GIVE_A_TOKEN}")
    if status == 403:
        about_the_token = "www-authenticate" in headers
        return AccessDenied(f"{url}: {detail}" + f"; {HOW_TO_GIVE_A_TOKEN}" * about_the_token)
    if status == 413:
        return InvalidDefinition([Problem("too_large", detail, "")])
    kind = str(problem.get("type", "")).rpartition(":")[2]
    if kind in _BY_FINDINGS:
        return _BY_FINDINGS[kind](_findings(problem, detail))
    if kind in _BY_WORDS:
        return _BY_WORDS[kind](detail)
    request_id = headers.get("x-request-id")
    where = f" (request {one_line(request_id)} in its log)" if request_id and status >= 500 else ""
    return ServerError(f"{url} answers {status}: {detail}{where}")


def findings_of(found: Any) -> tuple[Problem, ...]:
    """Problems of a validation, from the fields of the API."""
    return tuple(
        Problem(
            str(one["code"]),
            str(one["message"]),
            str(one["path"]),
            one.get("line"),
            one.get("column"),
        )
        for one in found
    )


def _findings(problem: Mapping[str, Any], detail: str) -> tuple[Problem, ...]:
    return findings_of(problem.get("errors", ())) or (Problem("invalid_field", detail, ""),)


def _problem(headers: Mapping[str, str], content: bytes) -> dict[str, Any] | None:
    if headers.get("content-type", "").partition(";")[0].strip().lower() != PROBLEM:
        return None
    try:
        problem = orjson.loads(content)
    except orjson.JSONDecodeError:
        return None
    return problem if isinstance(problem, dict) else None


def _not_ours(status: int, headers: Mapping[str, str], url: str) -> DovetailError:
    """From something in between, or from another server altogether."""
    if status in (502, 503, 504, 429):
        return ServerError(
            f"{url} answers {status}: what is in front of the server cannot reach it"
        )
    to = headers.get("location")
    if 300 <= status < 400 and to:
        # Not followed: the token is for the named server alone.
        return NoDovetail(f"{url} sends its callers to {one_line(to)}; use that address instead")
    kind = one_line(headers.get("content-type", "nothing"))
    return NoDovetail(
        f"{url} answers {status} with {kind}, which no Dovetail server does; is the address right?"
    )

"""Turns tasks into calls of handlers: checks the config, builds the context, seals the output.

Secrets end here: outputs, errors and progress are redacted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import orjson

from dovetail.core.caching import (
    INPUT,
    NAMES,
    SECRETS,
    VERSION,
    Caching,
    digest_of,
    names_digest,
    secrets_digest,
)
from dovetail.core.errors import DovetailError, PermanentError, SecretInKey
from dovetail.core.outputs import MAX_INPUT_BYTES
from dovetail.core.redaction import Redactor
from dovetail.core.templates import MAX_CONFIG_SIZE, render_deferred, secrets_read
from dovetail.core.values import MAX_BYTES, NotJson, encode
from dovetail.engine.ports import OnLines, Report, Task
from dovetail.handlers.context import Context, TrackedContext, unread
from dovetail.handlers.failure import describe
from dovetail.handlers.inputs import InputBudget, OutputSource, inputs_of
from dovetail.handlers.log_capture import CURRENT, ENDED, NO_LOG, WORKER_LOGGER, LogRules
from dovetail.handlers.registry import Handler, Registry


class RegistryCalls:
    def __init__(
        self,
        registry: Registry,
        *,
        secrets: Mapping[str, str] | None = None,
        sensitive: Mapping[str, str] | None = None,
        max_config_bytes: int = MAX_CONFIG_SIZE,
        max_output_bytes: int = MAX_BYTES,
        max_input_bytes: int = MAX_INPUT_BYTES,
        outputs_as_text: bool = False,
        elsewhere: Callable[[Task], OutputSource] | None = None,
        log_rules: LogRules = NO_LOG,
    ) -> None:
        """`sensitive` are values beside the secrets that are redacted, such as the API's tokens.
        `elsewhere` gives the source of inputs that are not in a task. With `log_rules` attempts
        have logs.

        With `outputs_as_text` an output may be JSON text, for a caller that only stores it.
        """
        self._registry = registry
        self._secrets = dict(secrets or {})
        self._max_config_bytes = max_config_bytes
        self._max_output_bytes = max_output_bytes
        self._budget = InputBudget(max_input_bytes)
        self._elsewhere = elsewhere
        self._log_rules = log_rules
        self._redactor = Redactor({**self._secrets, **(sensitive or {})})
        self._outputs_as_text = outputs_as_text and not self._redactor

    def open(self, task: Task, report: Report, on_lines: OnLines = unread) -> HandlerCall:
        try:
            handler = self._registry.get(task.handler)
            config = task.config
            names: frozenset[str] = frozenset()
            if task.deferred:
                # Checked again: a definition may be older than the rule, a message may be forged.
                config = render_deferred(
                    config,
                    task.deferred,
                    self._secrets,
                    self._max_config_bytes,
                    handler=task.handler,
                    fields=handler.secrets,
                )
                names = secrets_read(task.deferred)
            prepared = handler.prepare(config)
        except DovetailError as problem:
            # Not retried: the same definition would fail again on this worker.
            described = describe(problem, self._redactor.redact_shown)
            message = f"node '{task.node_id}': {described['message']}"
            raise PermanentError(message, type=described["type"]) from None
        except BaseException as problem:  # the handler's own validator is broken
            described = describe(problem, self._redactor.redact_shown)
            message = f"node '{task.node_id}': its config could not be checked: "
            message += f"{described['type']}: {described['message']}"
            raise PermanentError(message, type="invalid_config") from None
        reads = None if task.cache is None else self._reads(task, handler)
        context = (Context if reads is None else TrackedContext)(
            run_id=task.run_id,
            node_id=task.node_id,
            attempt=task.token.attempt,
            epoch=task.token.epoch,
            params=task.params if task.params is not None else partial(self._params, task),
            inputs=partial(self._inputs, task, reads),
            secrets=self._secrets if handler.secrets else _NotDeclared(handler.name),
            secret_names=names,
            report_progress=partial(report, task),
            redactor=self._redactor,
            seen=None if reads is None else reads.saw,
            log_rules=self._log_rules,
            on_lines=on_lines,
        )
        if isinstance(context, TrackedContext) and reads is not None:
            context.on_decided = reads.decide_by_config
        return HandlerCall(
            handler,
            prepared,
            context,
            self._redactor,
            self._max_output_bytes,
            self._outputs_as_text,
            reads,
        )

    def _reads(self, task: Task, handler: Handler) -> Reads:
        digest = partial(secrets_digest, self._secrets)
        return Reads(handler.version, digest, config_has_secrets=bool(task.deferred))

    def _params(self, task: Task) -> dict[str, Any]:
        assert self._elsewhere is not None, "a worker that takes such tasks can read them"  # noqa: S101
        return self._elsewhere(task).params()

    def _inputs(self, task: Task, reads: Reads | None) -> dict[str, Any]:
        if reads is None:
            return inputs_of(task, self._elsewhere, self._budget, None, None)
        return inputs_of(task, self._elsewhere, self._budget, reads.saw_input, reads.saw_names)


class Reads:
    """What the handler of a cached node has read, as digests of the values."""

    __slots__ = ("_config_has_secrets", "_facts", "_is_decided", "_secrets")

    def __init__(
        self, version: int, secrets: Callable[[], str], *, config_has_secrets: bool
    ) -> None:
        self._facts = {VERSION: str(version)}
        self._secrets = secrets
        self._is_decided = False
        self._config_has_secrets = config_has_secrets
        if config_has_secrets:
            self.saw(SECRETS, None)

    def decide_by_config(self) -> None:
        self._is_decided = True

    @property
    def facts(self) -> dict[str, str]:
        """The digests that a cache lookup compares. The config itself may have secrets."""
        if not self._is_decided:
            return dict(self._facts)
        kept = (VERSION, SECRETS) if self._config_has_secrets else (VERSION,)
        return {what: self._facts[what] for what in kept}

    def saw(self, what: str, value: Any) -> None:
        if what not in self._facts:
            self._facts[what] = self._secrets() if what == SECRETS else digest_of(value)

    def saw_input(self, name: str, value: Any) -> None:
        self.saw(INPUT + name, value)

    def saw_names(self, names: Iterable[str]) -> None:
        self._facts[NAMES] = names_digest(names)


class _NotDeclared(dict[str, str]):
    """The `ctx.secrets` of a handler that does not declare that it takes secrets: empty."""

    __slots__ = ("_handler",)

    def __init__(self, handler: str) -> None:
        super().__init__()
        self._handler = handler

    def __missing__(self, name: str) -> str:
        raise KeyError(
            f"the handler '{self._handler}' gets no secrets, as it does not declare that it takes "
            f"them: @handler({self._handler!r}, secrets=True)"
        )


class HandlerCall:
    __slots__ = (
        "_as_text",
        "_config",
        "_context",
        "_handler",
        "_max_output_bytes",
        "_reads",
        "_redactor",
        "is_async",
        "is_logged",
    )

    def __init__(
        self,
        handler: Handler,
        config: Any,
        context: Context,
        redactor: Redactor,
        max_output_bytes: int,
        as_text: bool,
        reads: Reads | None = None,
    ) -> None:
        self._handler = handler
        self._config = config
        self._context = context
        self._redactor = redactor
        self._max_output_bytes = max_output_bytes
        self._as_text = as_text
        self._reads = reads
        self.is_async = handler.is_async
        self.is_logged = context.log_rules is not NO_LOG

    def begin(self, task: Task) -> Any:
        if self.is_logged:
            CURRENT.set(self._context)
        return self._handler.fn(self._config, self._context)

    def cancel(self) -> None:
        self._context.cancel()

    def warn(self, message: str) -> None:
        if (log := self._context.lines()) is not None:
            log.add("WARNING", WORKER_LOGGER, message)

    def end_log(self) -> None:
        self._context.end_log()

    def seal(self, task: Task, output: Any) -> Any:
        """A JSON copy, so that the handler cannot change it any more."""
        if self._context._lines is None:  # as `end_log`, without the call: every node comes here
            self._context._lines = ENDED
        else:
            self._context.end_log()
        try:
            text = encode(output, max_bytes=self._max_output_bytes)
        except NotJson as problem:
            kind = "too_large" if problem.code == "too_large" else "invalid_output"
            message = self._redactor.redact_shown(problem.of_output())
            raise PermanentError(message, type=kind) from None
        except BaseException as problem:  # a type of the handler's own that raises when read
            described = self.describe(problem)
            message = (
                f"the handler's output cannot be read: {described['type']}: {described['message']}"
            )
            raise PermanentError(message, type="invalid_output") from None
        if self._as_text:
            return orjson.Fragment(text)
        try:
            return self._redactor.redact(orjson.loads(text))
        except SecretInKey as problem:
            message = f"the output cannot be stored: {problem}"
            message = self._redactor.redact_shown(message)
            raise PermanentError(message, type=problem.type) from None

    def caching(self, task: Task) -> Caching | None:
        if task.cache is None or self._reads is None:
            return None
        return task.cache._replace(facts=self._reads.facts)

    def describe(self, error: BaseException) -> dict[str, Any]:
        self._context.end_log()
        return describe(error, self._redactor.redact_shown)

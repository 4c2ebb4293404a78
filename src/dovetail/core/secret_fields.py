"""Where a secret may stand: as the plain name `secrets.NAME`, in a config that takes secrets.

A caller who may run workflows must not read a secret. Redaction recognises spellings; this rule
leaves no spelling to make. A definition is checked when it is validated, and a worker checks
again before it renders: it also gets what was stored before the rule, and messages that were put
on a queue by hand. What this file must not know: handlers, values of secrets.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, runtime_checkable

from dovetail.core.findings import shown

SecretFields = bool | Collection[str]
"""Where in a config: True, anywhere; a collection, in these fields; False, nowhere."""

PLAIN_ONLY = (
    "a secret may stand only as its plain name, alone or inside a text: {{ secrets.NAME }} or "
    "'Bearer {{ secrets.NAME }}'; no filter, operator, condition, item or attribute"
)
PLAIN_BESIDE = (
    "beside a secret only plain expressions may stand, such as {{ params.user }}: no filter, "
    "operator or condition; calculate the value in a node before, and read its output"
)


@runtime_checkable
class KnowsSecretFields(Protocol):
    """What knows handlers may also know which of them take secrets."""

    def secret_fields(self, name: str) -> SecretFields | None:
        """Where the config of a handler may have secrets; None: the handler is known, this not."""
        ...


def misplaced(handler: str, fields: SecretFields | None, field: object) -> str | None:
    """Why a secret may not stand in this field of the handler's config; None if it may."""
    if fields is True:
        return None
    name = shown(handler)
    if fields is None:
        return (
            f"it is not known whether the handler {name} takes secrets, so it gets none: the "
            "worker that announced it does not say so; start it with this version of dovetail"
        )
    if fields is False or not fields:
        return (
            f"the handler {name} takes no secrets; call_external_service does, and a handler of "
            "your own that declares it: @handler(…, secrets=True)"
        )
    if field in fields:
        return None
    allowed = ", ".join(sorted(fields))
    return f"{name} takes secrets in {allowed} of its config, not in {shown(str(field))}"

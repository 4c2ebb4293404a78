"""To which hosts a secret may be sent: the operator's word, whatever a definition says.

What it must not know: how a request is made, or the value of any secret.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from ipaddress import ip_address

from dovetail.config import hosts_variable
from dovetail.core.errors import PermanentError

ANYWHERE = "*"
SECRET_HOST = "secret_host"  # noqa: S105  (an error's type)


def bound_hosts(
    bindings: Mapping[str, Collection[str]], names: Collection[str]
) -> Callable[[str], None] | None:
    """A check of every host that a request with these secrets goes to; None: all may be.

    A redirect counts with all secrets of the request, also where it would drop a header: what
    the first host got it may have put into the place that it redirects to.
    """
    bound = {name: bindings[name] for name in sorted(names) if name in bindings}
    if not bound:
        return None

    def check(host: str) -> None:
        for name, allowed in bound.items():
            if not any(_fits(host, pattern) for pattern in allowed):
                raise PermanentError(
                    f"secret '{name}' may not be sent to {host}: {hosts_variable(name)} allows "
                    f"{', '.join(allowed)}; nothing was sent there",
                    type=SECRET_HOST,
                )

    return check


def _fits(host: str, pattern: str) -> bool:
    host = host.strip("[]").rstrip(".").lower()
    if pattern == ANYWHERE or host == pattern:
        return True
    if pattern.startswith("*."):
        return host.endswith(pattern[1:]) and len(host) > len(pattern) - 1
    try:  # an IPv6 address has many spellings
        return ip_address(host) == ip_address(pattern)
    except ValueError:
        return False

"""Names the extra to install when an optional package is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

PACKAGES = {
    "celery": ("celery", "kombu", "billiard", "vine", "amqp"),
    "redis": ("redis", "hiredis"),
    "postgres": ("asyncpg",),
    "documents": ("lxml", "pyarrow", "pypdfium2"),
}
"""The packages of each extra."""


@contextmanager
def imports_of(module: str, extra: str) -> Iterator[None]:
    """Wraps the imports of a module; raises a `ModuleNotFoundError` that names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not any(missing in packages for packages in PACKAGES.values()):
            raise  # another mistake, which an extra would not fix
        raise ModuleNotFoundError(
            f"{module} needs '{missing}', which is not installed: pip install 'dovetail[{extra}]'",
            name=error.name,
        ) from None

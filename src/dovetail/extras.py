"""Which extra has a package that is not installed, in words, for modules that cannot do without.

What it must not know: what the package is used for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

PACKAGES = {
    "celery": ("celery", "kombu", "billiard", "vine", "amqp"),
    "redis": ("redis", "hiredis"),
    "postgres": ("asyncpg",),
    "documents": ("lxml", "pyarrow", "pypdfium2"),
}
"""By extra, what it brings."""


@contextmanager
def imports_of(module: str, extra: str) -> Iterator[None]:
    """Around the imports of a module. Raises `ModuleNotFoundError` that names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not any(missing in packages for packages in PACKAGES.values()):
            raise  # a mistake of somebody's, which an extra would not mend
        raise ModuleNotFoundError(
            f"{module} needs '{missing}', which is not installed: pip install 'dovetail[{extra}]'",
            name=error.name,
        ) from None

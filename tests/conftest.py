"""For every test: real servers, and Hypothesis without a deadline: a slow machine is not a bug."""

from __future__ import annotations

import os

from hypothesis import settings

from .servers.fixtures import (
    llm,
    llm_stub,
    postgres_server,
    postgres_url,
    rabbitmq_server,
    rabbitmq_url,
    redis_server,
    redis_url,
    single_or_cluster,
)

__all__ = [
    "llm",
    "llm_stub",
    "postgres_server",
    "postgres_url",
    "rabbitmq_server",
    "rabbitmq_url",
    "redis_server",
    "redis_url",
    "single_or_cluster",
]

# The same examples at every run of the continuous integration; new ones at every run by hand.
settings.register_profile("dovetail", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("dovetail")

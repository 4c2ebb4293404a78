"""`dovetail migrate`: PostgreSQL gets the tables of this version, before any service starts."""

from __future__ import annotations

import asyncio

from dovetail.cli import output as streams
from dovetail.cli.failures import InvalidInput
from dovetail.config import env_name, load_settings
from dovetail.wiring.embedded import migrate_database


def migrate() -> None:
    settings = load_settings()
    if settings.database_url is None:
        raise InvalidInput(f"{env_name('database_url')} is not set: there is nothing to migrate")
    asyncio.run(migrate_database(settings.database_url))
    streams.say("PostgreSQL has the tables of this version")

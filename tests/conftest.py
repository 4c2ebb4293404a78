"""For every test: Hypothesis without a deadline, because a slow machine is not a bug."""

from __future__ import annotations

import os

from hypothesis import settings

# The same examples at every run of the continuous integration; new ones at every run by hand.
settings.register_profile("dovetail", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("dovetail")

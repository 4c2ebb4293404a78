"""Tests of workflows: runs in memory with mocks, on a clock that does not wait, and replays of
recorded runs. The pytest fixture `dovetail_runner` is a `Runner`.

Everything is real but the clock and what a test mocks: the validation, the rules, the worker.
"""

from dovetail.testing.replay import ReplayDiffers
from dovetail.testing.runner import FinishedRun, Runner

__all__ = ["FinishedRun", "ReplayDiffers", "Runner"]

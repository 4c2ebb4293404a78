"""The stack of a handler that has not returned, as a traceback: for the error of a timeout."""

from __future__ import annotations

import sys
from types import CodeType, CoroutineType, FrameType, GeneratorType, TracebackType
from typing import Any

MAX_DEPTH = 1000
"""Frames that are read."""


def stack_of_coroutine(work: object) -> TracebackType | None:
    """Where a suspended coroutine waits. Only Python's own coroutines and generators are read: an
    awaitable of another class may do anything when it is asked."""
    frames: list[FrameType] = []
    one: Any = work
    while len(frames) < MAX_DEPTH:
        if type(one) is CoroutineType:
            frame, one = one.cr_frame, one.cr_await
        elif type(one) is GeneratorType:
            frame, one = one.gi_frame, one.gi_yieldfrom
        else:
            break
        if frame is None:  # it has returned
            break
        frames.append(frame)
    return _traceback(frames)


def stack_of_thread(ident: int | None, below: CodeType) -> TracebackType | None:
    """What a thread executes at this moment, below the function with this code; None if it is not
    inside that function."""
    frame = None if ident is None else sys._current_frames().get(ident)
    frames: list[FrameType] = []
    while frame is not None and frame.f_code is not below:
        if len(frames) < MAX_DEPTH:
            frames.append(frame)
        frame = frame.f_back
    return None if frame is None else _traceback(frames[::-1])


def _traceback(frames: list[FrameType]) -> TracebackType | None:
    found: TracebackType | None = None
    for frame in reversed(frames):
        # A thread that runs may be between two lines.
        found = TracebackType(found, frame, max(0, frame.f_lasti), frame.f_lineno or 1)
    return found

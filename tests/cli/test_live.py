"""The live view on a real pseudo-terminal, read back from a screen."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import time
from dataclasses import dataclass, field

from .conftest import SCRIPT, SECONDS, Shell, environment
from .screen import Screen

WAITING = """
name: waiting
on_failure: continue
nodes:
  - {id: start, handler: input}
  - {id: pages, handler: slow, config: {seconds: 1.5}, dependencies: [start]}
  - {id: flaky, handler: broken, max_retries: 1, retry: {base_delay_seconds: 1, jitter: 0}}
  - {id: first, handler: input, resource_tag: search}
  - {id: second, handler: input, resource_tag: search}
  - {id: never, handler: input, condition: "{{ false }}"}
  - {id: after, handler: output, dependencies: [flaky]}
"""


@dataclass
class Watched:
    code: int
    screen: Screen
    pictures: list[list[str]] = field(default_factory=list)
    """The screen after every read."""

    def saw(self, pattern: str) -> bool:
        return any(re.search(pattern, line) for picture in self.pictures for line in picture)


def watch(
    shell: Shell, *args: str, rows: int = 24, columns: int = 80, type_at: str = "", **env: str
) -> Watched:
    """Run on a terminal of that size; press Ctrl-C once a picture shows `type_at`."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = subprocess.Popen(
        [SCRIPT, *args],
        cwd=shell.directory,
        env=environment(**env),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C is a signal
    )
    os.close(theirs)
    screen = Screen(rows, columns)
    pictures: list[list[str]] = []
    decode = codecs.getincrementaldecoder("utf-8")().decode
    deadline = time.monotonic() + SECONDS
    rest = ""
    try:
        while time.monotonic() < deadline:
            try:
                read = os.read(ours, 65536)
            except OSError:  # how Linux says that the other end is closed
                break
            text = rest + decode(read)
            # A sequence may be cut in two by the read.
            cut = text.rfind("\x1b") if re.search(r"\x1b\[?\??[0-9;]*$", text) else len(text)
            screen.feed(text[:cut])
            rest = text[cut:]
            pictures.append(screen.text)
            if type_at and any(type_at in line for line in screen.text):
                os.write(ours, b"\x03")
                type_at = ""
        return Watched(process.wait(5), screen, pictures)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_the_view_shows_the_state_of_each_node(shell: Shell) -> None:
    shell.write("flow.yaml", WAITING)
    shell.write("dovetail.toml", "[rate_limits]\nsearch = {rate_per_second = 0.6, burst = 1}\n")
    done = watch(shell, "run", "flow.yaml", "--handlers", "mine.py")
    assert done.code == 1
    assert done.saw(r"^● pages   1\.\ds  ━{20}   \d\d%  page \d of 10$")
    assert done.saw(r"^◌ flaky   retry 1 in 1s: PermissionError: out/ is not writable$")
    assert done.saw(r"^◌ second  rate limit search: starts in [12] s$")
    assert done.saw(r"^○ after$")
    assert done.saw(r"^RUNNING [0-9a-f]{6} waiting  \d+\.\ds  \d of 7 done, 1 skipped, 1 running")
    assert done.screen.colours >= {"31", "32", "36"}  # red, green, cyan


def test_the_last_frame_stays_with_the_summary_below_it(shell: Shell) -> None:
    shell.write("flow.yaml", WAITING.replace("seconds: 1.5", "seconds: 0.3"))
    done = watch(shell, "run", "flow.yaml", "--handlers", "mine.py", columns=100)
    last = [re.sub(r"\d+\.\ds", "TIME", line) for line in done.screen.text]
    last = [re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", "WHEN", line) for line in last]
    last = [re.sub(r"\b[0-9a-f]{6}\b", "RUN", line) for line in last]
    assert last == [
        "printed by a handler",
        "flaky: logged by a handler",
        "printed by a handler",
        "flaky: logged by a handler",
        "✓ start   TIME",
        "✓ pages   TIME",
        "✗ flaky   TIME  2 attempts",
        "✓ first   TIME",
        "✓ second  TIME",
        "– never   skipped: its condition is false",
        "– after   skipped: flaky failed",
        "FAILED RUN in TIME",
        "  flaky: PermissionError: out/ is not writable   (mine.py:15 in broken)",
        "  the end of its log, attempt 2:",
        "    WHEN INFO flaky[2] stdout: printed by a handler",
        "    WHEN INFO flaky[2] dovetail.handler: logged by a handler",
        "see more:  dovetail runs show RUN flaky",
        "           dovetail runs logs RUN --node flaky",
        "fix it, then:  dovetail runs retry RUN --handlers mine.py      reruns 3, reuses 4",
    ]
    assert done.screen.cursor_shown


def test_a_run_that_does_not_fit_the_screen_shows_active_nodes_and_a_summary(shell: Shell) -> None:
    nodes = [f"  - {{id: n{n}, handler: slow, config: {{seconds: 0.3}}}}" for n in range(100)]
    shell.write(
        "flow.yaml",
        "\n".join(
            ["name: f", "on_failure: continue", "nodes:", "  - {id: bad, handler: fail}", *nodes]
        ),
    )
    done = watch(shell, "run", "flow.yaml", "--handlers", "mine.py", rows=10, columns=50)
    assert done.code == 1
    assert done.saw(r"^✗ bad  0\.\ds$")
    assert done.saw(r"^● n\d+ ")
    assert done.saw(r"^RUNNING .* of 101 done")
    before_the_end = [line for line in done.screen.scrolled if line.startswith(("●", "RUNNING"))]
    assert before_the_end == []  # painted in place: nothing was left behind
    assert "101 of 101 done, 1 failed" in done.screen.text


def test_a_long_line_is_cut_at_the_edge_of_the_terminal(shell: Shell) -> None:
    shell.write("flow.yaml", WAITING.replace("seconds: 1.5", "seconds: 0.3"))
    done = watch(shell, "run", "flow.yaml", "--handlers", "mine.py", columns=30)
    assert done.saw("^◌ flaky   retry 1 in 1s: Perm.*…$")


def test_ctrl_c_on_a_terminal_ends_the_view_and_restores_the_cursor(shell: Shell) -> None:
    shell.write("flow.yaml", "name: f\nnodes: [{id: a, handler: sleep, config: {seconds: 60}}]")
    done = watch(shell, "run", "flow.yaml", type_at="● a")
    assert done.code == 130
    assert re.fullmatch(r"– a  \d+\.\ds  cancelled", done.screen.text[-3])
    assert re.fullmatch(r"CANCELLED [0-9a-f]{6} in \d+\.\ds", done.screen.text[-2])
    assert done.screen.text[-1].startswith("go on with:  dovetail runs retry ")
    assert done.screen.cursor_shown


def test_a_terminal_without_cursor_movement_gets_plain_lines(shell: Shell) -> None:
    shell.write("flow.yaml", "name: f\nnodes: [{id: a, handler: input}]")
    done = watch(shell, "run", "flow.yaml", TERM="dumb")
    assert done.code == 0
    assert done.screen.colours == set()
    assert done.screen.text[0].endswith("f, 1 node")


def test_no_color_removes_the_colours_but_keeps_the_live_view(shell: Shell) -> None:
    shell.write("flow.yaml", "name: f\nnodes: [{id: a, handler: input}]")
    done = watch(shell, "run", "flow.yaml", NO_COLOR="1")
    assert done.code == 0
    assert done.screen.colours == set()
    assert done.screen.text[0].startswith("✓ a"), "the view, and not its lines"


def test_a_report_is_coloured_on_a_terminal(shell: Shell) -> None:
    shell.write("flow.yaml", "name: f\nnodes: []\n")
    done = watch(shell, "validate", "flow.yaml")
    assert done.code == 2
    assert "31" in done.screen.colours
    assert done.screen.text[0].startswith("flow.yaml:2:8: empty_graph ")


def test_a_retry_on_a_terminal_reopens_the_rows(shell: Shell) -> None:
    shell.write(
        "flow.yaml",
        "name: f\non_failure: continue\nnodes:\n"
        "  - {id: fine, handler: counted}\n  - {id: broken, handler: needs, config: {file: go}}\n"
        "  - {id: slow, handler: slow, config: {seconds: 0.5}, dependencies: [broken]}\n",
    )
    assert shell("run", "flow.yaml", "--handlers", "mine.py").code == 1
    shell.write("go", "")
    done = watch(shell, "runs", "retry", "--handlers", "mine.py")
    assert done.code == 0
    assert done.saw(r"^● slow ")
    assert done.saw(r"^RUNNING [0-9a-f]{6} f  .*2 of 3 done")
    last = [re.sub(r"\d+\.\ds", "TIME", line) for line in done.screen.text]
    assert last[1:4] == ["✓ fine    TIME", "✓ broken  TIME", "✓ slow    TIME"]


def test_a_batch_shows_one_bar_that_fills(shell: Shell) -> None:
    shell.write("flow.yaml", "name: f\nnodes: [{id: a, handler: slow, config: {seconds: 0.2}}]")
    shell.write("items.jsonl", '{"n": 1}\n' * 300)
    batch = ("batch", "flow.yaml", "--items", "items.jsonl", "--handlers", "mine.py")
    done = watch(shell, *batch, DOVETAIL_CONCURRENCY="32")
    assert done.code == 0
    assert done.saw(r"^━{30}  \d+ of 300 done, \d+/s, about \ds left$")
    assert [line[:32] for line in done.screen.text[1:-1]] == ["━" * 30 + "  "]
    assert re.fullmatch(
        r"COMPLETED batch [0-9a-f]{6} in \d+\.\ds: 300 completed", done.screen.text[-1]
    )
    assert done.screen.cursor_shown


def test_ctrl_c_on_a_watched_run_restores_the_cursor(shell: Shell) -> None:
    shell.write("flow.yaml", "name: f\nnodes: [{id: a, handler: until, config: {file: go}}]")
    process = shell.start("run", "flow.yaml", "--handlers", "mine.py")
    shell.wait_for_start("a")
    done = watch(shell, "runs", "watch", type_at="● a")
    assert done.code == 130
    assert done.screen.text[-1].startswith("the run goes on without this view: dovetail runs watch")
    assert done.screen.cursor_shown
    shell.write("go", "")
    assert process.wait(SECONDS) == 0

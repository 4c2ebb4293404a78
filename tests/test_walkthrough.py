"""The walk-through with curl and the page about the client: each is done, against a real server.

The commands of the walk-through run in one shell, as a reader would type them.
"""

from __future__ import annotations

import json
import queue
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .pages import BIN, PORT, ROOT, blocks, comparable, environment, typed, write_files

WALK = ROOT / "docs" / "walkthrough.md"
CLIENT = ROOT / "docs" / "client.md"
TOKEN = "s3cret"


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """As the page starts it, on a port that is free; gives host and port."""
    process = subprocess.Popen(
        [BIN / "dovetail", "serve", "--port", "0"],
        cwd=folder,
        env=environment(DOVETAIL_TOKENS=TOKEN),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        assert process.stdout is not None
        read = process.stdout.readline
        threading.Thread(target=lambda: lines.put(read()), daemon=True).start()
        yield lines.get(timeout=60).split("//")[-1].strip().replace("127.0.0.1", "localhost")
    finally:
        process.terminate()
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()


def steady(printed: str, place: str = PORT) -> str:
    """Without ids and times, and with the port of the page."""
    printed = printed.replace(place, PORT)
    printed = re.sub(r"[0-9a-f]{32}", "ID", printed)
    printed = re.sub(r"(\"request_id\":)\"[0-9a-f]+\"", r'\1"ID"', printed)
    printed = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", "TIME", printed)
    printed = re.sub(r"(\"duration\":)[\d.e-]+", r"\g<1>0.0", printed)
    printed = re.sub(r"(\"worker\":)\"[^\"]+\"", r'\1"WORKER"', printed)
    return comparable(printed)


def test_the_walkthrough_prints_the_shown_output(tmp_path: Path) -> None:
    write_files(WALK, tmp_path)
    with server(tmp_path) as place:
        walked = typed(WALK, place, tmp_path)
    assert len(walked) > 25
    for command, says, printed in walked:
        assert steady(printed, place) == steady(says), command


def test_the_client_page_prints_the_shown_output(tmp_path: Path) -> None:
    with server(tmp_path) as place:
        for block in blocks(CLIENT, "python"):
            (tmp_path / "program.py").write_text(block.text.replace(PORT, place))
            done = subprocess.run(
                [BIN / "python", "program.py"],
                cwd=tmp_path,
                env=environment(),
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.splitlines()[-1].endswith("run.completed None")
            # What the program registered is what the commands of the page use.
            hello = re.search(r"^HELLO = (.*)$", block.text, re.MULTILINE)
            assert hello
            (tmp_path / "hello.json").write_text(json.dumps(json.loads(hello[1])))
        for command, says, printed in typed(CLIENT, place, tmp_path):
            assert steady(printed, place) == steady(says), command

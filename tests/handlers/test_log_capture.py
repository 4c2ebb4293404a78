"""What handlers log and print reaches the log of their attempt, and nothing else does."""

from __future__ import annotations

import asyncio
import contextvars
import io
import logging
import multiprocessing
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import orjson
import pytest
import structlog

from dovetail.core.node_logs import MAX_LINE_BYTES, LogChunk, LogLine
from dovetail.core.redaction import Redactor
from dovetail.handlers import log_capture
from dovetail.handlers.context import Context
from dovetail.handlers.log_capture import CURRENT, AttemptLog, LogRules, capturing

SECRET = "hunter2-hunter2"
RULES = LogRules()


class Node:
    """An attempt, and what its log got."""

    def __init__(self, rules: LogRules = RULES, name: str = "n") -> None:
        self.told: list[AttemptLog] = []
        self.chunks: list[LogChunk] = []
        self.context = Context(
            run_id="r",
            node_id=name,
            attempt=2,
            epoch=3,
            redactor=Redactor({"KEY": SECRET}),
            log_rules=rules,
            on_lines=self.told.append,
        )

    def run(self, work: Callable[..., Any], *args: Any) -> Any:
        """Call it as a worker calls a handler."""
        if log_capture._hooks.output:
            log_capture.cover_streams()  # pytest replaces them behind the fixtures
        context = contextvars.copy_context()
        context.run(CURRENT.set, self.context)
        return context.run(work, *args)

    def end(self) -> None:
        self.context._end_log()

    def lines(self) -> list[LogLine]:
        """All lines so far."""
        while self.told:
            self.chunks += self.told.pop().drain()
        return [line for chunk in self.chunks for line in chunk.lines]

    def messages(self) -> list[str]:
        return [line.message for line in self.lines()]


@pytest.fixture
def rules() -> LogRules:
    return LogRules()


@pytest.fixture(autouse=True)
def captured(rules: LogRules) -> Iterator[None]:
    with capturing(rules):
        yield


@pytest.fixture
def node(rules: LogRules) -> Node:
    return Node(rules)


@pytest.fixture(autouse=True)
def plain_structlog() -> Iterator[None]:
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


def parts(line: LogLine) -> tuple[str, str, str, Any]:
    return line.level, line.logger, line.message, line.fields


class TestLogging:
    def test_a_record_of_any_logger_is_a_line(self, node: Node) -> None:
        def handler() -> None:
            logging.getLogger("shop.orders").info("%d rows", 3, extra={"rows": 3})
            logging.warning("careful")

        before = time.time()
        node.run(handler)
        first, second = node.lines()
        assert parts(first) == ("INFO", "shop.orders", "3 rows", {"rows": 3})
        assert parts(second) == ("WARNING", "root", "careful", None)
        assert before <= first.time <= second.time <= time.time()
        (chunk,) = node.chunks
        assert chunk[:5] == ("r", "n", 3, 2, 0)

    def test_a_line_of_ctx_log_is_recorded_once_with_its_extra_alone(self, node: Node) -> None:
        node.run(lambda: node.context.log.info("%s rows", 3, extra={"rows": 3}))
        assert list(map(parts, node.lines())) == [
            ("INFO", "dovetail.handler", "3 rows", {"rows": 3})
        ]

    def test_ctx_log_reaches_its_own_attempt_from_anywhere(self, node: Node) -> None:
        other = Node(name="other")
        other.run(lambda: node.context.log.info("mine"))
        node.context.log.info("also mine")
        assert node.messages() == ["mine", "also mine"]
        assert other.messages() == []

    @pytest.mark.parametrize("rules", [LogRules(level=logging.WARNING)])
    def test_records_below_the_level_of_the_log_are_not_kept(self, node: Node) -> None:
        def handler() -> None:
            logging.getLogger("shop").info("less")
            logging.getLogger("shop").warning("more")
            node.context.log.info("less")
            structlog.get_logger().info("less")
            structlog.get_logger().error("more, too")

        node.run(handler)
        assert node.messages() == ["more", "more, too"]

    @pytest.mark.parametrize("rules", [LogRules(level=logging.DEBUG)])
    def test_debug_is_kept_if_it_is_asked_for(self, node: Node) -> None:
        def handler() -> None:
            logging.getLogger("shop").debug("a")
            node.context.log.debug("b")

        logging.getLogger("dovetail").setLevel(logging.INFO)
        try:
            node.run(handler)
        finally:
            logging.getLogger("dovetail").setLevel(logging.NOTSET)
        assert node.messages() == ["a", "b"]

    def test_a_level_that_is_set_for_a_logger_counts(self, node: Node) -> None:
        logger = logging.getLogger("quiet.one")
        logging.getLogger("quiet").setLevel(logging.ERROR)
        node.run(lambda: (logger.warning("no"), logger.error("yes")))
        assert node.messages() == ["yes"]

    def test_logging_that_is_disabled_is_not_kept(self, node: Node) -> None:
        logging.disable(logging.WARNING)
        try:
            node.run(lambda: (logging.warning("no"), logging.error("yes")))
        finally:
            logging.disable(logging.NOTSET)
        assert node.messages() == ["yes"]

    def test_a_logger_that_does_not_propagate_is_kept(self, node: Node) -> None:
        logger = logging.getLogger("alone")
        logger.propagate = False
        logger.addHandler(logging.NullHandler())
        node.run(lambda: logger.info("heard"))
        assert node.messages() == ["heard"]

    def test_a_level_without_a_name_counts_as_the_next_lower_one(self, node: Node) -> None:
        node.run(lambda: (logging.log(25, "notice"), logging.log(55, "alarm")))
        assert [line.level for line in node.lines()] == ["INFO", "CRITICAL"]

    def test_the_engines_own_loggers_are_not_part_of_a_nodes_log(self, node: Node) -> None:
        node.run(lambda: logging.getLogger("dovetail.redis").warning("away"))
        assert node.messages() == []

    def test_an_exception_and_its_cause_are_part_of_the_message(self, node: Node) -> None:
        def handler() -> None:
            try:
                try:
                    int("x")
                except ValueError as cause:
                    raise KeyError("k") from cause
            except KeyError:
                logging.getLogger("shop").exception("failed")

        node.run(handler)
        (line,) = node.lines()
        assert line.level == "ERROR"
        assert line.message.startswith("failed\nTraceback (most recent call last):\n")
        assert "ValueError: invalid literal" in line.message
        assert line.message.endswith("KeyError: 'k'")

    def test_a_slip_in_a_log_line_is_kept_and_harms_nothing(
        self, node: Node, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(logging, "raiseExceptions", False)

        class Broken:
            def __str__(self) -> str:
                raise RuntimeError

        def handler() -> str:
            logging.getLogger("shop").info("%d rows", "x")
            logging.getLogger("shop").info(Broken())
            logging.getLogger("shop").info("fine", extra={"broken": Broken()})
            return "done"

        assert node.run(handler) == "done"
        assert "%d rows ('x',)" in node.messages()
        assert "fine" in node.messages()

    def test_the_console_of_the_user_says_what_it_said_before(self, node: Node) -> None:
        """Root at WARNING: an INFO reaches the log of the node alone, whatever the handlers."""
        out, near = io.StringIO(), io.StringIO()
        root, shop = logging.getLogger(), logging.getLogger("near.shop")
        handlers = [logging.StreamHandler(out), logging.StreamHandler(near)]
        root.addHandler(handlers[0])
        shop.addHandler(handlers[1])
        level = root.level
        root.setLevel(logging.WARNING)

        def handler() -> None:
            shop.info("quiet")
            shop.warning("loud")
            logging.basicConfig()  # does nothing, as without us

        try:
            node.run(handler)
            shop.info("not in a node")
        finally:
            root.setLevel(level)
            root.removeHandler(handlers[0])
            shop.removeHandler(handlers[1])
        assert out.getvalue() == near.getvalue() == "loud\n"
        assert node.messages() == ["quiet", "loud"]

    def test_a_record_that_a_console_prints_is_one_line(
        self, node: Node, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with capturing(LogRules()):
            console = logging.StreamHandler(sys.stderr)  # the captured one
            logging.getLogger("shop").addHandler(console)
            try:
                node.run(lambda: logging.getLogger("shop").warning("once"))
            finally:
                logging.getLogger("shop").removeHandler(console)
        assert node.messages() == ["once"]


class TestOutput:
    def test_what_is_printed_is_kept_by_line_and_passed_on(
        self, node: Node, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def handler() -> None:
            print("one", 2, "three")
            print("to stderr", file=sys.stderr)
            sys.stdout.writelines(["a\nb\n", "c\n"])

        with capturing(LogRules()):
            node.run(handler)
        assert list(map(parts, node.lines())) == [
            ("INFO", "stdout", "one 2 three", None),
            ("WARNING", "stderr", "to stderr", None),
            ("INFO", "stdout", "a", None),
            ("INFO", "stdout", "b", None),
            ("INFO", "stdout", "c", None),
        ]
        assert capsys.readouterr() == ("one 2 three\na\nb\nc\n", "to stderr\n")

    def test_the_beginning_of_a_line_waits_for_its_end(self, node: Node) -> None:
        node.run(lambda: print("one, ", end=""))
        (log,) = node.told
        assert node.messages() == []
        assert log.is_waiting
        node.run(lambda: print("two", file=sys.stderr, end=""))
        node.run(lambda: print("two\nthr", end=""))
        node.run(lambda: print("ee"))
        assert node.messages() == ["one, two", "three"]

    def test_the_beginning_of_a_line_is_a_line_at_the_end_of_the_attempt(self, node: Node) -> None:
        node.run(lambda: print("no end", end=""))
        (log,) = node.told
        assert log.drain() == []
        assert log.is_waiting
        node.end()
        assert [line.message for chunk in log.drain() for line in chunk.lines] == ["no end"]
        assert log.drain() == []

    @pytest.mark.parametrize("rules", [LogRules(output=False)])
    def test_nothing_printed_is_kept_if_that_is_not_wanted(
        self, node: Node, capsys: pytest.CaptureFixture[str], rules: LogRules
    ) -> None:
        with capturing(rules):
            node.run(lambda: print("only printed"))
            node.run(lambda: logging.warning("logged"))
        assert node.messages() == ["logged"]
        assert "only printed" in capsys.readouterr().out

    def test_a_captured_stream_is_the_stream_in_everything_else(self) -> None:
        real = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", errors="replace")
        stream = log_capture.CapturedStream(real, "stdout")
        assert (stream.encoding, stream.errors, stream.isatty()) == ("latin-1", "replace", False)
        assert stream.buffer is real.buffer
        stream.reconfigure(encoding="utf-8")
        assert real.encoding == "utf-8"
        with pytest.raises(TypeError):
            stream.write(b"bytes")  # type: ignore[arg-type]
        with pytest.raises(AttributeError, match="nonsense"):
            _ = stream.nonsense
        with pytest.raises(io.UnsupportedOperation):
            stream.fileno()

    def test_ansi_nul_surrogates_and_unicode_can_be_stored(self, node: Node) -> None:
        words = "\x1b[31mred\x1b[0m \0 ä€😀 \ud800"
        with capturing(LogRules()):
            sys.stdout = log_capture.CapturedStream(io.StringIO(), "stdout")  # type: ignore[assignment]
            node.run(lambda: print(words))
        node.run(lambda: logging.getLogger("x").info(words, extra={"w": words}))
        node.run(lambda: structlog.get_logger(w=words).bind().info(words))
        lines = node.lines()
        assert len(lines) == 3
        for line in lines:
            assert line.message == words.replace("\ud800", "\\ud800")
            orjson.dumps(line._asdict())

    def test_a_long_line_is_cut_even_if_it_comes_in_small_pieces(self, node: Node) -> None:
        def handler() -> None:
            for _ in range(100):
                print("x" * 1000, end="")
            print()
            print("next")

        node.run(handler)
        first, second = node.messages()
        assert len(first) <= MAX_LINE_BYTES
        assert first.endswith(" more bytes)")
        assert second == "next"

    def test_a_process_of_its_own_prints_as_ever(self, node: Node, capfd: Any) -> None:
        def handler() -> None:
            fork = multiprocessing.get_context("fork")
            child = fork.Process(target=partial(print, "in a child", flush=True))
            child.start()
            child.join()
            subprocess.run([sys.executable, "-c", "print('in another')"], check=True)

        with capturing(LogRules()):
            node.run(handler)
        assert node.messages() == []
        assert capfd.readouterr().out == "in a child\nin another\n"


class TestStructlog:
    def test_an_event_keeps_its_level_and_its_fields(self, node: Node) -> None:
        def handler() -> None:
            log = structlog.get_logger().bind(order=7)
            log.warning("paid", amount=12.5, of={"a": [1]})

        node.run(handler)
        assert list(map(parts, node.lines())) == [
            ("WARNING", "structlog", "paid", {"order": 7, "amount": 12.5, "of": {"a": [1]}})
        ]

    def test_an_event_is_one_line_though_it_is_printed(
        self, node: Node, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with capturing(LogRules()):
            node.run(lambda: structlog.get_logger().info("paid", order=7))
        assert node.messages() == ["paid"]
        assert "paid" in capsys.readouterr().out

    def test_a_cached_logger_is_heard(self, node: Node) -> None:
        structlog.configure(cache_logger_on_first_use=True)
        log = structlog.get_logger()
        log.info("outside")
        node.run(lambda: log.info("inside", n=1))
        assert [parts(line)[2:] for line in node.lines()] == [("inside", {"n": 1})]

    @pytest.mark.parametrize("as_json", [True, False])
    def test_the_factory_of_the_standard_library_is_heard_once(
        self, node: Node, as_json: bool, capsys: pytest.CaptureFixture[str]
    ) -> None:
        structlog.configure(
            processors=[
                structlog.stdlib.filter_by_level,
                structlog.stdlib.add_logger_name,
                structlog.stdlib.add_log_level,
                structlog.stdlib.PositionalArgumentsFormatter(),
                structlog.processors.TimeStamper(fmt="iso"),
                structlog.processors.JSONRenderer()
                if as_json
                else structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
            ],
            logger_factory=structlog.stdlib.LoggerFactory(),
            wrapper_class=structlog.stdlib.BoundLogger,
        )
        node.run(lambda: structlog.get_logger("shop").warning("%d paid", 3, order=7))
        node.run(lambda: structlog.get_logger("shop").debug("no"))
        assert list(map(parts, node.lines())) == [("WARNING", "shop", "3 paid", {"order": 7})]

    def test_a_processor_of_the_user_may_take_fields_out(self, node: Node) -> None:
        def without_card(logger: Any, method: str, event: Any) -> Any:
            event.pop("card", None)
            if event["event"] == "drop":
                raise structlog.DropEvent
            return event

        structlog.configure(processors=[without_card, structlog.processors.JSONRenderer()])
        node.run(lambda: structlog.get_logger().info("paid", card="4111"))
        node.run(lambda: structlog.get_logger().info("drop"))
        assert [parts(line)[2:] for line in node.lines()] == [("paid", None)]

    def test_an_exception_is_part_of_the_message(self, node: Node) -> None:
        def handler() -> None:
            try:
                int("x")
            except ValueError:
                structlog.get_logger().exception("failed")

        node.run(handler)
        (line,) = node.lines()
        assert (line.level, line.message.split("\n")[0]) == ("ERROR", "failed")
        assert "ValueError: invalid literal" in line.message

    def test_structlog_is_heard_if_it_is_imported_by_the_handler(self) -> None:
        code = """
import sys, contextvars
from dovetail.core.redaction import Redactor
from dovetail.handlers.context import Context
from dovetail.handlers.log_capture import CURRENT, LogRules, capturing
told = []
ctx = Context(run_id="r", node_id="n", log_rules=LogRules(), on_lines=told.append)
with capturing(LogRules()):
    assert "structlog" not in sys.modules
    CURRENT.set(ctx)
    import structlog
    structlog.get_logger().info("heard", n=1)
    CURRENT.set(None)
    print([line[1:] for line in told[0].drain()[0].lines])
from structlog._base import BoundLoggerBase
assert not hasattr(BoundLoggerBase._proxy_to_logger, "original")
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "[('INFO', 'structlog', 'heard', {'n': 1})]"


class TestSecrets:
    def test_are_redacted_in_each_place(self, node: Node) -> None:
        log = logging.getLogger("shop")

        def handler() -> None:
            log.info("token %s", SECRET)
            log.info(f"token {SECRET}")
            log.info("x", extra={"url": f"http://h/?t={SECRET}", "deep": [{"k": SECRET}]})
            log.info("x", extra={f"a {SECRET}": 1})
            try:
                raise ValueError(SECRET)
            except ValueError:
                log.exception("failed")
                structlog.get_logger().exception("failed")
            structlog.get_logger().info(SECRET, key=SECRET)
            structlog.get_logger().bind(key=[SECRET]).info("x")
            node.context.log.info(SECRET)
            print(SECRET)
            print(SECRET, file=sys.stderr)
            log.info(SECRET.encode().hex())

        node.run(handler)
        node.end()
        assert len(node.lines()) == 12
        shown = str(node.lines())
        assert "hunter2" not in shown
        assert SECRET.encode().hex() not in shown
        assert shown.count("***") >= 12

    def test_are_redacted_if_they_come_in_several_writes(self, node: Node) -> None:
        def handler() -> None:
            for char in f"token {SECRET} end\n":
                sys.stdout.write(char)
            sys.stdout.write(SECRET[:7])
            sys.stdout.write(SECRET[7:] + "\n" + SECRET[:5])
            sys.stderr.write("between\n")
            sys.stdout.write(SECRET[5:])

        node.run(handler)
        node.end()
        assert node.messages() == ["token *** end", "***", "between", "***"]

    def test_are_redacted_if_they_have_several_lines(self) -> None:
        key = "-----BEGIN KEY-----\nMIIEabcdef0123456789\nqwertyuiop987654321\n-----END KEY-----"
        node = Node()
        node.context = Context(
            run_id="r",
            node_id="n",
            redactor=Redactor({"KEY": key}),
            log_rules=LogRules(),
            on_lines=node.told.append,
        )
        node.run(lambda: print("the key:", key))
        assert node.messages() == ["the key: ***"]

    def test_are_redacted_where_a_long_line_is_cut(self, node: Node) -> None:
        def handler() -> None:
            for room in range(MAX_LINE_BYTES - 100, MAX_LINE_BYTES + 20, 7):
                print("x" * room + SECRET)

        node.run(handler)
        assert "hunter2" not in str(node.lines())


class TestThreads:
    def test_a_thread_that_a_handler_starts_writes_to_its_log(self, node: Node) -> None:
        class Own(threading.Thread):
            def run(self) -> None:
                print("own")

        def handler() -> None:
            log = logging.getLogger("shop")
            timer = threading.Timer(0, log.info, ["timer"])
            for thread in (threading.Thread(target=log.info, args=["plain"]), Own(), timer):
                thread.start()
                thread.join()
                assert "run" not in vars(thread)

        node.run(handler)
        assert node.messages() == ["plain", "own", "timer"]

    def test_work_in_a_pool_writes_to_the_log_of_the_attempt_that_submitted_it(self) -> None:
        one, two = Node(name="one"), Node(name="two")
        with ThreadPoolExecutor(1) as pool:  # its thread begins under the first one
            one.run(lambda: pool.submit(print, "of one").result())
            two.run(lambda: pool.submit(print, "of two").result())
            pool.submit(print, "of none").result()
            two.run(lambda: list(pool.map(print, ["mapped"])))
        assert one.messages() == ["of one"]
        assert two.messages() == ["of two", "mapped"]

    async def test_every_way_into_a_thread_and_a_task_keeps_the_attempt(self, node: Node) -> None:
        log_capture.cover_streams()

        async def handler() -> None:
            loop = asyncio.get_running_loop()
            await asyncio.to_thread(print, "to_thread")
            await loop.run_in_executor(None, print, "run_in_executor")
            await asyncio.create_task(self._says("task"))
            await asyncio.gather(self._says("gathered"))
            done = asyncio.Event()
            loop.call_soon(lambda: (print("soon"), done.set()))
            await done.wait()

        context = contextvars.copy_context()
        context.run(CURRENT.set, node.context)
        await asyncio.get_running_loop().create_task(handler(), context=context)
        await asyncio.to_thread(print, "not of the handler")
        assert node.messages() == ["to_thread", "run_in_executor", "task", "gathered", "soon"]

    @staticmethod
    async def _says(word: str) -> None:
        print(word)

    def test_handlers_that_share_pools_and_threads_never_mix(self) -> None:
        nodes = [Node(name=f"node{number}") for number in range(6)]
        chance = random.Random(7)

        def says(name: str, number: int) -> None:
            match number % 4:
                case 0:
                    print(name, number)
                case 1:
                    logging.getLogger(f"any.{number % 3}").info("%s %d", name, number)
                case 2:
                    structlog.get_logger().info(f"{name} {number}")
                case 3:
                    sys.stderr.write(f"{name} ")
                    time.sleep(0)
                    sys.stderr.write(f"{number}\n")

        def all_of(works: list[Callable[[], None]]) -> None:
            for work in works:
                work()

        def handler(node: Node, pools: list[ThreadPoolExecutor]) -> None:
            name = node.context.node_id
            for number in range(0, 120, 4):
                works = [partial(says, name, number + i) for i in range(4)]
                pool = chance.choice(pools)
                pool.submit(all_of, works[:3]).result()
                thread = threading.Thread(target=works[3])
                thread.start()
                thread.join()

        with ThreadPoolExecutor(2) as shared, ThreadPoolExecutor(1) as other:
            threads = [
                threading.Thread(target=node.run, args=(handler, node, [shared, other]))
                for node in nodes
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for node in nodes:
            found = node.messages()
            assert len(found) == 120
            assert {message.split()[0] for message in found} == {node.context.node_id}
            assert sorted(int(message.split()[1]) for message in found) == list(range(120))

    def test_lines_after_the_end_of_the_attempt_are_only_printed(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        node, silent = Node(), Node()
        with capturing(LogRules()):
            go = threading.Event()
            threads: list[threading.Thread] = []

            def handler(words: str) -> None:
                def late() -> None:
                    go.wait()
                    print(words)
                    logging.getLogger("shop").info(words)

                threads.append(threading.Thread(target=late))
                threads[-1].start()

            node.run(lambda: print("in time"))
            node.run(handler, "late")
            silent.run(handler, "later")
            node.end()
            silent.end()
            go.set()
            for thread in threads:
                thread.join()
        assert node.messages() == ["in time"]
        assert silent.told == []
        assert set(capsys.readouterr().out.splitlines()) == {"in time", "late", "later"}


class TestHooks:
    def test_the_last_engine_that_closes_restores_everything(self) -> None:
        log_capture._hooks.uninstall(LogRules())  # the fixture's
        try:
            places = [
                (logging.Logger, "isEnabledFor"),
                (logging.Logger, "callHandlers"),
                (threading.Thread, "start"),
                (ThreadPoolExecutor, "submit"),
                (structlog._base.BoundLoggerBase, "_proxy_to_logger"),
                (sys, "stdout"),
                (sys, "stderr"),
            ]
            before = [getattr(place, name) for place, name in places]
            path = list(sys.meta_path)
            with capturing(LogRules(output=False)):
                with capturing(LogRules()):
                    now = [getattr(place, name) for place, name in places]
                    assert all(new is not old for new, old in zip(now, before, strict=True))
                assert (sys.stdout, sys.stderr) == (before[-2], before[-1])
                assert logging.Logger.callHandlers is now[1]
            assert [getattr(place, name) for place, name in places] == before
            assert sys.meta_path == path
        finally:
            log_capture._hooks.install(LogRules())

    def test_a_hook_that_another_library_has_covered_stays_and_works_again(self) -> None:
        ours = threading.Thread.start

        def theirs(self: threading.Thread) -> None:
            ours(self)

        threading.Thread.start = theirs  # type: ignore[method-assign]
        try:
            log_capture._hooks.uninstall(LogRules())
            assert threading.Thread.start is theirs
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()
            log_capture._hooks.install(LogRules())
            node = Node()

            def handler() -> None:
                thread = threading.Thread(target=print, args=["heard"])
                thread.start()
                thread.join()

            node.run(handler)
            assert node.messages() == ["heard"]
        finally:
            threading.Thread.start = ours  # type: ignore[method-assign]

    def test_the_worker_is_told_once_until_the_lines_are_drained(self, node: Node) -> None:
        node.run(lambda: [print(number) for number in range(10)])
        (log,) = node.told
        assert [chunk.number for chunk in log.drain()] == [0]
        node.run(lambda: print("more"))
        assert node.told == [log, log]

    def test_a_handler_that_says_nothing_has_no_log(self, node: Node) -> None:
        node.run(lambda: None)
        assert node.context._lines is None
        assert node.told == []


class TestMuch:
    @pytest.mark.parametrize("at_once", [True, False])
    def test_fifty_megabytes_of_output_stay_bounded(self, at_once: bool) -> None:
        node = Node()
        row = "y" * 99 + "\n"

        def handler() -> None:
            if at_once:
                sys.stdout.write(row * 500_000)
            else:
                for _ in range(5000):
                    sys.stdout.write(row * 100)

        with capturing(LogRules()):
            sys.stdout = log_capture.CapturedStream(Nowhere(), "stdout")  # type: ignore[assignment]
            node.run(handler)
        node.lines()
        kept = sum(len(chunk.lines) for chunk in node.chunks)
        last = node.chunks[-1]
        assert kept + last.missing_lines == 500_000
        assert last.missing_bytes == last.missing_lines * 99
        assert sum(len(line.message) for line in node.lines()) <= 1 << 20
        assert all(not chunk.drops for chunk in node.chunks)

    def test_a_line_of_fifty_megabytes_is_cut(self, node: Node) -> None:
        with capturing(LogRules()):
            sys.stdout = log_capture.CapturedStream(Nowhere(), "stdout")  # type: ignore[assignment]
            node.run(lambda: print("z" * 50_000_000))
            node.run(lambda: print("and on"))
        first, second = node.messages()
        assert len(first) <= MAX_LINE_BYTES
        assert second == "and on"

    def test_ten_thousand_lines_a_second_take_little_of_it(self, node: Node) -> None:
        def handler() -> None:
            log = logging.getLogger("shop")
            for number in range(10_000):
                log.info("row %d of the table", number)

        began = time.process_time()
        node.run(handler)
        assert time.process_time() - began < 2  # usually 0.2
        assert len(node.lines()) == 10_000


class Nowhere(io.StringIO):
    def write(self, text: str) -> int:
        return len(text)

"""Declaring handlers, knowing them by name, and loading them from files and packages."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
import textwrap
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, Field

from dovetail.config import Settings
from dovetail.core.errors import DovetailError, NotFound, PermanentError
from dovetail.handlers.builtin import builtin_registry, load_registry
from dovetail.handlers.context import Context
from dovetail.handlers.registry import Handler, HandlerError, Registry, describe, handler, marked

CTX = Context(run_id="r", node_id="n")


@pytest.fixture(autouse=True)
def _clean_imports(monkeypatch):
    """Loading changes sys.path and sys.modules; other tests must not see it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("dovetail_handlers_", "flows", "sibling")):
            del sys.modules[name]


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return str(path)


WORD_COUNT = """
    from dovetail.handlers.registry import handler

    @handler("word_count", max_retries=2)
    async def word_count(config, ctx):
        "Counts words."
        return {"words": len(config["text"].split())}
"""


class TestTheDecorator:
    def test_leaves_the_function_as_it_was(self):
        @handler("twice", max_retries=1)
        def twice(config: dict, ctx: Context) -> int:
            return config["n"] * 2

        assert twice({"n": 2}, CTX) == 4
        (known,) = marked(twice, "here.py:1")
        assert (known.name, known.max_retries, known.is_async) == ("twice", 1, False)
        assert known.fn is twice
        assert known.origin == "here.py:1"

    def test_works_bare_and_takes_the_functions_name(self):
        @handler
        async def plain(config, ctx):
            return 1

        (known,) = marked(plain, "x")
        assert (known.name, known.max_retries, known.is_async) == ("plain", 0, True)

    def test_works_with_empty_brackets(self):
        @handler(max_retries=4)
        async def plain(config, ctx):
            return 1

        assert marked(plain, "x")[0].max_retries == 4

    def test_can_give_one_function_two_names(self):
        @handler("b")
        @handler("a", max_retries=1)
        def both(config, ctx):
            return 1

        assert [(known.name, known.max_retries) for known in marked(both, "x")] == [
            ("a", 1),
            ("b", 0),
        ]

    def test_takes_the_first_paragraph_as_description(self):
        def documented(config, ctx):
            """Does
            things.

            At length.
            """

        assert describe(documented).description == "Does things."

    @pytest.mark.parametrize(
        ("fn", "said"),
        [
            (lambda config: 1, r"takes \(config, ctx\); this one takes \(config\)"),
            (lambda: 1, r"this one takes \(\)"),
            (lambda config, ctx, more: 1, "this one takes"),
            (lambda config, *, ctx: 1, "this one takes"),
        ],
    )
    def test_refuses_a_signature_that_could_not_be_called(self, fn, said):
        with pytest.raises(HandlerError, match=said):
            handler("h")(fn)

    def test_accepts_every_signature_that_can_be_called(self):
        handler("h")(lambda c, x, more=1: 1)
        handler("h")(lambda *args: 1)
        handler("h")(lambda config, /, ctx, **rest: 1)

    @pytest.mark.parametrize("name", ["", "a b", "-a", ".a", "a/b", "a:b", "x" * 129, 3, "ü"])
    def test_refuses_a_name_that_is_none(self, name):
        with pytest.raises(HandlerError, match="a name is 1 to 128 letters"):
            handler(name)(lambda config, ctx: 1)

    @pytest.mark.parametrize("retries", [-1, True, 1.5, "3", None])
    def test_refuses_retries_that_are_no_count(self, retries):
        with pytest.raises(HandlerError, match="whole number ≥ 0"):
            handler("h", max_retries=retries)(lambda config, ctx: 1)

    def test_says_whether_it_takes_secrets_and_where(self):
        @handler("all", secrets=True)
        @handler("some", secrets=["headers", "body"])
        @handler("none")
        async def fn(config, ctx): ...

        known = {one.name: one.secrets for one in marked(fn, "here")}
        assert known == {"all": True, "some": {"headers", "body"}, "none": False}
        for wrong in ("headers", [1], 7, None):
            with pytest.raises(HandlerError, match="secrets is True, False or the names"):
                handler("x", secrets=wrong)(fn)

    def test_refuses_what_does_not_return_an_output(self):
        def generator(config, ctx):
            yield 1

        async def async_generator(config, ctx):
            yield 1

        class Thing:
            def __init__(self, config, ctx): ...

        for wrong in (generator, async_generator, Thing):
            with pytest.raises(HandlerError, match="not a class and not a generator"):
                handler("h")(wrong)

    def test_refuses_what_it_cannot_mark(self):
        class Holder:
            def method(self, config, ctx):
                return 1

        with pytest.raises(HandlerError, match="cannot be marked"):
            handler("h")(Holder().method)


class Sizes(BaseModel):
    model_config = ConfigDict(extra="forbid")

    width: int = Field(gt=0)
    height: int = Field(default=1, alias="h")


class Inner(BaseModel):
    sizes: list[Sizes]


class TestConfigs:
    def test_without_a_model_stay_the_dict(self):
        config = {"a": 1}
        assert describe(lambda config, ctx: 1, name="x").prepare(config) is config
        assert describe(lambda config, ctx: 1, name="x").config_schema() is None

    def test_with_a_model_become_it(self):
        def area(config: Sizes, ctx: Context) -> int:
            return config.width * config.height

        known = describe(area)
        assert known.config_model is Sizes
        assert known.fn(known.prepare({"width": "3", "h": 2}), CTX) == 6
        assert known.config_schema() == Sizes.model_json_schema()

    def test_that_violate_the_model_are_refused_with_every_problem(self):
        def area(config: Sizes, ctx: Context) -> int:
            return 1

        with pytest.raises(PermanentError) as refused:
            describe(area).prepare({"width": -1, "hh": 2})
        assert refused.value.type == "invalid_config"
        assert str(refused.value) == (
            "config of handler 'area': width: Input should be greater than 0; "
            "hh: unknown field; did you mean 'h'?"
        )
        assert refused.value.__cause__ is None

    def test_name_the_place_of_a_problem_deep_inside(self):
        def deep(config: Inner, ctx: Context) -> int:
            return 1

        with pytest.raises(PermanentError, match=r"sizes\.1\.width: Field required"):
            describe(deep).prepare({"sizes": [{"width": 1}, {}]})

    def test_do_not_show_what_was_given(self):
        def area(config: Sizes, ctx: Context) -> int:
            return 1

        with pytest.raises(PermanentError) as refused:
            describe(area).prepare({"width": "hunter2"})
        assert "hunter2" not in str(refused.value)

    def test_may_have_an_annotation_that_means_nothing_here(self):
        def odd(config: Sizes, ctx: Nowhere) -> int:  # noqa: F821
            return 1

        def quoted(config: "Sizes", ctx: Nowhere) -> int:  # noqa: F821, UP037
            return 1

        def unknown(config: Nowhere, ctx: Context) -> int:  # noqa: F821
            return 1

        assert describe(odd).config_model is Sizes
        assert describe(quoted).config_model is Sizes
        assert describe(unknown).config_model is None

    def test_of_a_callable_object_are_found_too(self):
        class Area:
            async def __call__(self, config: Sizes, ctx: Context) -> int:
                return 1

        known = describe(Area(), name="area")
        assert (known.is_async, known.config_model) == (True, Sizes)
        assert describe(functools.partial(lambda a, c, x: 1, 1), name="p").is_async is False


class TestARegistry:
    def test_knows_what_is_built_in(self):
        registry = builtin_registry(Settings())
        assert list(registry) == [
            "input", "output", "call_external_service", "llm_service", "sleep", "fail",
            "llm_generate",
        ]  # fmt: skip
        assert len(registry) == 7
        assert len(registry.handlers()) == 6
        assert registry.aliases() == {"llm_generate": "llm_service"}
        assert registry.get("llm_generate") is registry.get("llm_service")
        assert "llm_generate" in registry
        assert "nobody" not in registry
        assert all(known.origin == "built in" for known in registry.handlers())
        assert all(known.description for known in registry.handlers())

    def test_says_the_default_retries_of_names_and_aliases(self):
        assert builtin_registry(Settings()).default_retries() == {
            "input": 0, "output": 0, "call_external_service": 3, "llm_service": 3, "sleep": 0,
            "fail": 0, "llm_generate": 3,
        }  # fmt: skip

    def test_says_what_was_probably_meant(self):
        registry = builtin_registry(Settings())
        with pytest.raises(NotFound, match=r"no handler 'inptu'; did you mean 'input'?"):
            registry.get("inptu")
        with pytest.raises(NotFound, match="known here: call_external_service, fail"):
            registry.get("zzz")

    def test_refuses_another_handler_of_a_known_name(self):
        registry = Registry()
        registry.add(Handler("a", lambda c, x: 1, origin="one.py:1"), "b")
        with pytest.raises(HandlerError, match=r"two.py:2: handler 'a' is already defined in one"):
            registry.add(Handler("a", lambda c, x: 2, origin="two.py:2"))
        with pytest.raises(HandlerError, match=r"handler 'b' is already defined"):
            registry.add(Handler("b", lambda c, x: 2, origin="two.py:2"))

    @pytest.mark.parametrize("name", ["input", "llm_generate"])
    def test_refuses_to_replace_what_is_built_in(self, name):
        registry = builtin_registry(Settings())
        with pytest.raises(HandlerError, match=f"handler '{name}' is built in"):
            registry.add(Handler(name, lambda c, x: 1, origin="mine.py:3"))

    def test_takes_the_same_function_twice(self):
        registry = Registry()
        known = Handler("a", lambda c, x: 1)
        registry.add(known)
        registry.add(known)
        assert registry.handlers() == [known]


class TestAFile:
    def test_is_loaded(self, tmp_path):
        spec = write(tmp_path / "flow_handlers.py", WORD_COUNT)
        registry = Registry()
        (known,) = registry.load(spec)
        assert registry.get("word_count") is known
        assert (known.max_retries, known.description) == (2, "Counts words.")
        assert known.origin == "flow_handlers.py:4"

    def test_loaded_twice_changes_nothing(self, tmp_path):
        counter = tmp_path / "loaded"
        spec = write(
            tmp_path / "h.py",
            WORD_COUNT
            + f"\n    import os; os.close(os.open({str(counter)!r}, os.O_CREAT | os.O_EXCL))\n",
        )
        registry = Registry()
        registry.load(spec)
        registry.load(str(tmp_path / "." / "h.py"))
        Registry().load(spec)
        assert len(registry.handlers()) == 1
        assert counter.exists()

    def test_of_the_same_name_elsewhere_is_another_one(self, tmp_path):
        first = write(tmp_path / "a" / "h.py", WORD_COUNT)
        second = write(tmp_path / "b" / "h.py", WORD_COUNT.replace("word_count", "other"))
        registry = Registry()
        registry.load(first)
        registry.load(second)
        assert list(registry) == ["word_count", "other"]

    def test_that_defines_a_known_name_again_is_refused(self, tmp_path):
        first = write(tmp_path / "a.py", WORD_COUNT)
        second = write(tmp_path / "b.py", WORD_COUNT)
        registry = Registry()
        registry.load(first)
        with pytest.raises(HandlerError, match=r"b.py:4: handler 'word_count' .* in a.py:4"):
            registry.load(second)

    def test_can_import_its_neighbours_and_use_pydantic(self, tmp_path):
        write(tmp_path / "sibling_helper.py", "FACTOR = 3\n")
        spec = write(
            tmp_path / "h.py",
            """
            from __future__ import annotations
            from pydantic import BaseModel
            from dovetail.handlers.registry import handler
            import sibling_helper

            class Numbers(BaseModel):
                n: int
                more: list[Numbers] = []

            @handler
            def times(config: Numbers, ctx) -> int:
                return config.n * sibling_helper.FACTOR
            """,
        )
        (known,) = Registry().load(spec)
        assert known.fn(known.prepare({"n": 2, "more": [{"n": 1}]}), CTX) == 6

    def test_cannot_put_its_neighbours_in_the_place_of_installed_packages(self, tmp_path):
        write(tmp_path / "orjson.py", "raise RuntimeError('shadowed')\n")
        Registry().load(write(tmp_path / "h.py", WORD_COUNT))
        assert sys.path[-1] == str(tmp_path)

    def test_offers_what_it_imports_once(self, tmp_path):
        write(tmp_path / "sibling_words.py", WORD_COUNT)
        text = "from sibling_words import word_count\nagain = word_count\n"
        registry = Registry()
        registry.load(write(tmp_path / "one.py", text))
        registry.load(write(tmp_path / "two.py", text))
        assert [known.origin for known in registry.handlers()] == ["one.py"]

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("\n\nimport nowhere_to_be_found\n", "h.py:3: ModuleNotFoundError: No module named"),
            ("x = 1\ny = x / 0\n", "h.py:2: ZeroDivisionError: division by zero"),
            ("def f(:\n", "h.py:1: SyntaxError: invalid syntax"),
            ("def f():\n    raise ValueError\n\nf()\n", "h.py:2: ValueError"),
            ("import sys\nsys.exit(3)\n", "h.py:2: SystemExit: 3"),
            ("import json\njson.loads('{')\n", "h.py:2: JSONDecodeError:"),
            (
                "from dovetail.handlers.registry import handler\n@handler\ndef f(a): ...\n",
                "h.py:2: @handler('f'): a handler takes (config, ctx); this one takes (a)",
            ),
            ("x = 1\n", 'no handler in it; decorate a function: @handler("name")'),
        ],
    )
    def test_that_fails_is_reported_in_one_line(self, tmp_path, text, said):
        spec = write(tmp_path / "h.py", text)
        with pytest.raises(DovetailError) as refused:
            Registry().load(spec)
        assert said in str(refused.value)
        assert spec in str(refused.value)
        assert "\n" not in str(refused.value)
        with pytest.raises(DovetailError):  # and again, not half loaded
            Registry().load(spec)

    def test_that_fails_in_a_neighbour_names_its_own_line(self, tmp_path):
        write(tmp_path / "sibling_broken.py", "\n1 / 0\n")
        spec = write(tmp_path / "h.py", "\n\n\nimport sibling_broken\n")
        with pytest.raises(HandlerError, match=r"h\.py:4: ZeroDivisionError"):
            Registry().load(spec)

    def test_that_is_not_there_is_reported(self, tmp_path):
        with pytest.raises(HandlerError, match="there is no such file"):
            Registry().load(str(tmp_path / "none.py"))
        with pytest.raises(HandlerError, match="there is no such file"):
            Registry().load("~nobody-of-that-name/handlers.py")
        (tmp_path / "dir.py").mkdir()
        with pytest.raises(HandlerError, match="is a directory"):
            Registry().load(str(tmp_path / "dir.py"))
        with pytest.raises(HandlerError, match=r"must end in .py"):
            Registry().load(write(tmp_path / "handlers.txt", "x = 1"))
        with pytest.raises(HandlerError, match="empty name"):
            Registry().load("  ")

    def test_does_not_hide_an_interrupt(self, tmp_path):
        spec = write(tmp_path / "h.py", "raise KeyboardInterrupt\n")
        with pytest.raises(KeyboardInterrupt):
            Registry().load(spec)


class TestAModule:
    @pytest.fixture(autouse=True)
    def _here(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)

    def test_is_found_from_the_current_directory(self, tmp_path):
        write(tmp_path / "flows" / "__init__.py", "")
        write(tmp_path / "flows" / "words.py", WORD_COUNT)
        (known,) = Registry().load("flows.words")
        assert known.origin == "flows.words"

    def test_may_be_a_package_that_collects_others(self, tmp_path):
        write(tmp_path / "flows" / "__init__.py", "from flows.words import word_count\n")
        write(tmp_path / "flows" / "words.py", WORD_COUNT)
        (known,) = Registry().load("flows")
        assert known.name == "word_count"

    def test_that_is_not_there_is_reported(self, tmp_path):
        write(tmp_path / "flows" / "__init__.py", "")
        with pytest.raises(HandlerError, match=r"there is no module 'flows\.none' here; is it"):
            Registry().load("flows.none")
        with pytest.raises(HandlerError, match="there is no module 'nowhere_at_all' here"):
            Registry().load("nowhere_at_all.sub")

    def test_that_fails_names_file_and_line(self, tmp_path):
        write(tmp_path / "flows" / "__init__.py", "")
        write(tmp_path / "flows" / "broken.py", "\nimport nowhere_at_all\n")
        with pytest.raises(HandlerError, match=r"flows\.broken \(broken\.py:2\): ModuleNotFound"):
            Registry().load("flows.broken")
        write(tmp_path / "flows" / "syntax.py", "def f(:\n")
        with pytest.raises(HandlerError, match=r"flows\.syntax \(syntax\.py:1\): SyntaxError"):
            Registry().load("flows.syntax")

    def test_with_an_invalid_name_is_reported(self):
        with pytest.raises(HandlerError, match=r"handlers not..a..name"):
            Registry().load("not..a..name")

    def test_without_handlers_is_reported(self):
        with pytest.raises(HandlerError, match="handlers json: no handler in it"):
            Registry().load("json")


class TestEntryPoints:
    @pytest.fixture
    def installed(self, tmp_path, monkeypatch):
        """Makes tmp_path look like site-packages with one package installed."""
        monkeypatch.syspath_prepend(str(tmp_path))

        def install(value: str) -> None:
            info = tmp_path / "flows_plugin-1.0.dist-info"
            write(info / "METADATA", "Metadata-Version: 2.1\nName: flows-plugin\nVersion: 1.0\n")
            write(info / "entry_points.txt", f"[dovetail.handlers]\nwords = {value}\n")
            write(tmp_path / "flows_plugin.py", WORD_COUNT + "\n    other = 3\n")

        return install

    def test_may_name_a_module(self, installed):
        installed("flows_plugin")
        (known,) = Registry().load_entry_points()
        assert (known.name, known.origin) == ("word_count", "flows_plugin")

    def test_may_name_a_function(self, installed):
        installed("flows_plugin:word_count")
        registry = load_registry(Settings())
        assert registry.get("word_count").origin == "flows_plugin"

    def test_that_name_no_handler_are_reported_with_their_package(self, installed):
        installed("flows_plugin:other")
        with pytest.raises(
            HandlerError, match=r"entry point 'words' of flows-plugin: .* no handler"
        ):
            Registry().load_entry_points()

    def test_that_fail_are_reported_with_their_package(self, installed):
        installed("flows_plugin:nothing")
        with pytest.raises(HandlerError, match="entry point 'words' of flows-plugin: Attribute"):
            Registry().load_entry_points()

    def test_of_an_unknown_package_are_reported_too(self, monkeypatch):
        entry = importlib.metadata.EntryPoint("x", "nowhere_at_all", "dovetail.handlers")
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry])
        with pytest.raises(HandlerError, match="entry point 'x' of an installed package"):
            Registry().load_entry_points()


def test_everything_is_loaded_in_one_call(tmp_path):
    one = write(tmp_path / "one.py", WORD_COUNT)
    two = write(tmp_path / "two.py", WORD_COUNT.replace("word_count", "two"))
    registry = load_registry(Settings(handlers=(one,)), [two])
    assert list(registry)[6:] == ["word_count", "two", "llm_generate"]

"""Random runs of ten nodes: every rule has a part in them, and each says what it must come to.

A node's handler does what its config tells it, so a run's outcome does not depend on who ran it:
only on which starts were lost and what was cancelled, and that is in its log. What it must not
know: how a run is driven, or what breaks meanwhile.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from dovetail.core.items import split_name

NODES = 10
HANDLERS = ("act", "act_in_thread")
TAGS = ("slow", "slower")
"""Groups with a rate limit: a node with such a tag is parked now and then."""
WAYS = ["works"] * 24 + ["flaky"] * 5 + ["late", "failing", "broken"]
"""What handlers do: most work, some fail at first or run out of time, some never work."""
FAILING = ("failing", "broken")


@dataclass(frozen=True, slots=True)
class Plan:
    """One run, before it is submitted."""

    definition: dict[str, Any]
    params: dict[str, Any]

    @property
    def nodes(self) -> dict[str, dict[str, Any]]:
        return {node["id"]: node for node in self.definition["nodes"]}

    def number(self, node: str, outputs: dict[str, Any]) -> int:
        """What the node gives if it works, from what its parents gave; of a skipped one nothing."""
        name, item = split_name(node)
        spec = self.nodes[name]
        read = [_sum(outputs[parent]) for parent in spec["dependencies"] if parent in outputs]
        adds = 1 if item is not None else int(spec["config"]["adds"])
        return adds + (item or 0) + sum(read)

    def items(self, node: str) -> int | None:
        """How many items a mapped node has."""
        each = self.nodes[node].get("for_each")
        return None if each is None else len(each["items"])

    def wanted(self, node: str, outputs: dict[str, Any]) -> bool:
        """What its condition says."""
        asked = self.nodes[node].get("condition")
        if asked is None:
            return True
        name, _, limit = asked.strip("{} ").replace(" | default(0)", "").partition(" > ")
        source, _, _ = name.partition(".")
        value = self.params["x"] if source == "params" else outputs.get(source, {"n": 0})["n"]
        return bool(value > int(limit))


def _sum(output: Any) -> int:
    """What a node gave; a mapped one, all its items together."""
    return sum(map(_sum, output)) if isinstance(output, list) else int(output["n"])


def draw_mapped(chance: random.Random, most: int = 60) -> Plan:
    """A mapped node between two others, with items that fail at first, or are slow; and a plain
    node beside it that fails now and then."""
    quick = {"seconds": 0, "way": "works", "of": []}
    total = chance.choice((0, 1, 7, most // 2, most))
    config: dict[str, Any] = {
        "adds": "{{ index + 1 }}",
        # What n0 gives: items that read no other node may be sent ahead.
        "of": [chance.choice(("{{ n0.n }}", 2))],
        "seconds": chance.choice((0, 0.01, 0.1 if most <= 60 else 0.02)),
        "way": "works",
    }
    mapped: dict[str, Any] = {
        "id": "n1",
        "handler": chance.choice(HANDLERS),
        "dependencies": ["n0"],
        "for_each": {"items": list(range(total)), "max_concurrency": chance.choice((3, 10, 100))},
        "retry": {"base_delay_seconds": 0.1},
        "config": config,
    }
    if chance.random() < 0.3:
        mapped["max_retries"] = 1
        config |= {"way": "flaky", "fails": 1}
    if chance.random() < 0.15:
        mapped["resource_tag"] = "slow"
        mapped["for_each"]["items"] = mapped["for_each"]["items"][:7]
    beside = {**quick, "adds": 1, "seconds": 0.3}
    beside["way"] = chance.choice(("works", "works", "works", "broken"))
    read = "{{ n1 | sum(attribute='n') }}"
    nodes = [
        {"id": "n0", "handler": "act", "dependencies": [], "config": {**quick, "adds": 2}},
        mapped,
        {
            "id": "n2",
            "handler": "act",
            "dependencies": ["n0"],
            "config": {**beside, "of": ["{{ n0.n }}"]},
        },
        {
            "id": "n3",
            "handler": "act",
            "dependencies": ["n1"],
            "config": {**quick, "adds": 1, "of": [read]},
        },
    ]
    definition = {
        "name": "storm",
        "on_failure": chance.choice(("fail_fast", "continue")),
        "max_concurrency": chance.choice((None, None, 4)),
        "nodes": nodes,
    }
    return Plan(definition, {"x": 0})


def draw_any(chance: random.Random) -> Plan:
    """Mostly ten nodes; now and then a mapped node with up to 1,000 items."""
    return draw_mapped(chance, 1000) if chance.random() < 0.15 else draw(chance)


def draw(chance: random.Random) -> Plan:
    """Some run; the same for the same state of `chance`."""
    nodes: list[dict[str, Any]] = []
    for number in range(NODES):
        above = [node["id"] for node in nodes]
        parents = sorted(chance.sample(above, min(len(above), chance.choice((0, 1, 1, 2, 3)))))
        nodes.append(_node(chance, f"n{number}", parents))
    definition = {
        "name": "storm",
        "on_failure": chance.choice(("fail_fast", "continue")),
        "max_concurrency": chance.choice((None, None, 1, 3)),
        "nodes": nodes,
    }
    return Plan(definition, {"x": chance.randrange(10)})


def draw_slow(chance: random.Random) -> Plan:
    """A few nodes that take their time and do nothing else: what is held up by a death shows."""
    config = {"of": [], "seconds": 1.0, "way": "works"}
    nodes = [
        {"id": f"n{i}", "handler": "act", "dependencies": [], "config": {**config, "adds": i}}
        for i in range(4)
    ]
    after = [f"{{{{ n{i}.n }}}}" for i in range(4)]
    last = {**config, "seconds": 0, "adds": chance.randrange(1, 5), "of": after}
    above = [node["id"] for node in nodes]
    nodes.append({"id": "n4", "handler": "act", "dependencies": above, "config": last})
    return Plan({"name": "storm", "on_failure": "continue", "nodes": nodes}, {"x": 0})


def draw_quick(chance: random.Random) -> Plan:
    """Nodes that take no time, so that there can be thousands of them."""
    nodes: list[dict[str, Any]] = []
    for number in range(chance.randrange(3, 7)):
        above = [node["id"] for node in nodes]
        parents = sorted(chance.sample(above, min(len(above), chance.choice((1, 1, 2)))))
        config = {
            "adds": chance.randrange(1, 5),
            "of": [f"{{{{ {parent}.n | default(0) }}}}" for parent in parents],
            "seconds": 0,
            "way": "works",
        }
        node = {"id": f"n{number}", "handler": "act", "dependencies": parents, "config": config}
        if chance.random() < 0.1:
            node |= {"max_retries": 1, "retry": {"base_delay_seconds": 0.1}}
            config |= {"way": "flaky", "fails": 1}
        if chance.random() < 0.1 and parents:
            node["condition"] = f"{{{{ {parents[0]}.n | default(0) > {chance.randrange(6)} }}}}"
        nodes.append(node)
    return Plan({"name": "storm", "on_failure": "continue", "nodes": nodes}, {"x": 0})


def _node(chance: random.Random, name: str, parents: list[str]) -> dict[str, Any]:
    way = chance.choice(WAYS)
    seconds = chance.choice((0, 0, 0, 0.01, 0.05, chance.uniform(0.1, 1.5)))
    config: dict[str, Any] = {
        "adds": chance.randrange(1, 5),
        "of": [f"{{{{ {parent}.n | default(0) }}}}" for parent in parents],
        "seconds": round(seconds, 3),
        "way": way,
    }
    node = {
        "id": name,
        "handler": chance.choice(HANDLERS),
        "dependencies": parents,
        "config": config,
        "retry": {"base_delay_seconds": round(chance.uniform(0.02, 0.3), 3), "jitter": 0.5},
    }
    if chance.random() < 0.15 and way in ("works", *FAILING):
        node["delivery"] = "at_most_once"
    elif way in ("flaky", "late"):
        node["max_retries"] = chance.randrange(1, 3)
        config["fails"] = chance.randrange(1, node["max_retries"] + 1)
        # Long enough that what was said of one attempt can come while the next one runs.
        config["seconds"] = round(chance.uniform(0.1, 0.8), 3)
        if way == "late":
            config["seconds"] = 0
            node["timeout_seconds"] = 1.5
    elif way == "failing":
        node["max_retries"] = chance.randrange(0, 3)
    if chance.random() < 0.2:
        source = f"{chance.choice(parents)}.n | default(0)" if parents else "params.x"
        node["condition"] = f"{{{{ {source} > {chance.randrange(0, 6)} }}}}"
    if chance.random() < 0.1:
        node["resource_tag"] = chance.choice(TAGS)
    return node

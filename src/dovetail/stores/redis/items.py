"""What Redis keeps of mapped nodes and their items, as lua/items.lua writes it.

`maps` has the counts of each mapped node and the states of its items in flight. `queue` has the
items that wait again after a retry, are held, or ended without an output. `items` has a record of
each item that has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import orjson

from dovetail.core.dag import Graph
from dovetail.core.items import ENDED, PLACES, ItemEnd, MapState, item_place, split_place
from dovetail.core.outputs import OutputReference, ReadBudget
from dovetail.core.run import NodeState, Phase, RunState
from dovetail.core.states import NodeStatus, Reason
from dovetail.stores.redis.codec import SEPARATOR, fill_end, node_of, node_status, pairs
from dovetail.stores.redis.packed import RECORD_REST_OFFSET, packed_record, unpacked_record

HELD_OFFSET, ENDED_OFFSET = 1 << 40, 1 << 41
"""What `queue` adds to the place of an item to get its score: nothing if it waits again after a
retry, the first if it is held, the second if it ended without an output. No place is so large."""


class MapCounts(NamedTuple):
    """What the scripts count of a mapped node, in this order; see items.lua."""

    total: int
    window: int
    tolerated: int
    """How many items may fail."""
    next: int
    """The first item that was never begun."""
    again: int
    """How many items before `next` wait again after a retry."""
    in_flight: int
    running: int
    completed: int
    failed: int
    cancelled: int
    first: int
    """The failed item with the lowest number; -1 if none failed."""
    kept_bytes: int
    """Of the outputs of its items."""

    @classmethod
    def parse(cls, text: bytes) -> MapCounts:
        return cls(*map(int, text.split(SEPARATOR.encode())))

    @property
    def text(self) -> str:
        return SEPARATOR.join(map(str, self))

    @classmethod
    def of_reused(cls, graph: Graph, index: int, node: NodeState) -> MapCounts | None:
        """The counts of a node that a fork reuses. None if it is not mapped."""
        spec, items = graph.nodes[index].for_each, node.items
        if spec is None or items is None:
            return None
        counts = (items.total, spec.window, spec.tolerated(items.total), 0, 0, 0, 0, items.total)
        return cls(*counts, failed=0, cancelled=0, first=-1, kept_bytes=node.size)

    @property
    def is_reused(self) -> bool:
        return not self.next and self.completed > 0

    @property
    def output_size(self) -> int:
        """The bytes of the node's output: the outputs of its items, a null for each other item,
        commas and brackets."""
        return self.kept_bytes + 4 * (self.total - self.completed) + max(self.total - 1, 0) + 2


class StoredMaps(NamedTuple):
    """What Redis keeps of the mapped nodes of a run and of their items, beside the records of items
    that have ended."""

    maps: Mapping[int, bytes]
    """By index the counts of a mapped node, by place the state of an item that is in flight."""
    queue: Mapping[int, int]
    """Scores in the sorted set `queue`, by place."""

    @classmethod
    def parse(cls, maps: Sequence[bytes], queue: Sequence[bytes]) -> StoredMaps:
        return cls(
            {int(place): text for place, text in pairs(maps)},
            {int(place): int(float(score)) for place, score in pairs(queue)},
        )

    @classmethod
    def of_archive(cls, counts: str, nodes: Mapping[int, str]) -> StoredMaps:
        """The same from what the archive has: the counts, and the items among these nodes."""
        maps = parsed_counts(counts)
        texts = {place: text.encode() for place, text in nodes.items() if place >= PLACES}
        return cls(
            {index: one.text.encode() for index, one in maps.items()}
            | {place: text for place, text in texts.items() if text[:1] not in b"CFX"},
            _queue(maps, texts),
        )

    def counts_text(self) -> str:
        """The counts of all mapped nodes, as JSON."""
        counts = {str(i): text.decode() for i, text in self.maps.items() if i < PLACES}
        return orjson.dumps(counts).decode()

    def items(self, touched: set[int] | None) -> Iterator[tuple[int, bytes | None]]:
        """The state of each item that is in flight, and None for each item that has ended.

        Without `touched`, of all items; else only of these.
        """
        for place, text in self.maps.items():
            if place >= PLACES and (touched is None or place in touched):
                yield place, text
        if touched is None:
            ended = (place for index in self.maps if index < PLACES for place in self.ended(index))
        else:
            waiting = {place for place, score in self.queue.items() if score < HELD_OFFSET}
            ended = (
                place
                for place in touched
                if place not in self.maps and place not in waiting and self._is_begun(place)
            )
        for place in ended:
            yield place, None

    def _is_begun(self, place: int) -> bool:
        index, item = split_place(place)
        counts = self.maps.get(index)
        return counts is not None and (item or 0) < MapCounts.parse(counts).next

    def ended(self, index: int, *, without_output: bool = False) -> list[int]:
        """The places of a node's items that have ended."""
        first = item_place(index, 0)
        last = first + MapCounts.parse(self.maps[index]).next
        if without_output:
            return sorted(
                place
                for place, score in self.queue.items()
                if score >= ENDED_OFFSET and first <= place < last
            )
        waiting = {place for place, score in self.queue.items() if score < HELD_OFFSET}
        return [p for p in range(first, last) if p not in self.maps and p not in waiting]


def places_in(events: Iterable[bytes]) -> set[int]:
    """The places of the items that these events, unpacked, are about."""
    found = (orjson.loads(text)[3] for text in events)
    return {place for place in found if place is not None and place >= PLACES}


def parsed_counts(text: str) -> dict[int, MapCounts]:
    """The reverse of `StoredMaps.counts_text`."""
    return {int(i): MapCounts.parse(one.encode()) for i, one in orjson.loads(text).items()}


def _queue(maps: Mapping[int, MapCounts], texts: Mapping[int, bytes]) -> dict[int, int]:
    """Derive `queue`, scores by place, from the counts of mapped nodes and the states of items."""
    found: dict[int, int] = {}
    for index, counts in maps.items():
        first = item_place(index, 0)
        for place in range(first, first + counts.next):
            text = texts.get(place)
            if text is None:
                found[place] = place
            elif text[:1] in b"FX":
                found[place] = place + ENDED_OFFSET
            elif text[:1] == b"Q" and text.split(b"|")[8] == b"H":
                found[place] = place + HELD_OFFSET
    return found


def recounted_maps(
    counts: Mapping[int, MapCounts],
    nodes: Mapping[int, Sequence[str]],
    records: Mapping[int, bytes],
) -> tuple[dict[int, MapCounts], dict[int, int]]:
    """Derive the counts of mapped nodes, and `queue` as the script takes it (places by score), from
    their items: `nodes` are in flight, `records` have ended."""
    texts = {place: SEPARATOR.join(fields).encode() for place, fields in nodes.items()}
    texts.update(records)
    queue = _queue(counts, texts)
    made: dict[int, MapCounts] = {}
    for index, one in counts.items():
        first = item_place(index, 0)
        states = [nodes[place] for place in range(first, first + one.next) if place in nodes]
        again = sum(
            score < HELD_OFFSET for place, score in queue.items() if split_place(place)[0] == index
        )
        running = sum(fields[0] == "R" for fields in states)
        made[index] = one._replace(in_flight=len(states), running=running, again=again)
    return made, {score: place for place, score in queue.items()}


def split_record(record: bytes) -> tuple[bytes, bytes | None]:
    """A record of an item as text without its output, and the output, if the record has one."""
    return (record, None) if record[:1] != b"C" else unpacked_record(record)


def joined_record(head: bytes, output: bytes | None) -> bytes:
    """The reverse of `split_record`."""
    if head[:1] != b"C":
        return head
    return packed_record(head, b"null" if output is None else output)


def add_maps(
    run: RunState,
    stored: StoredMaps,
    ends: Mapping[bytes, bytes],
    records: Mapping[int, bytes],
) -> None:
    """Add the items of mapped nodes to a run.

    An item that has ended and has no record here counts as completed, without its output.
    """
    by_node: dict[int, list[tuple[int, bytes]]] = {}
    for place, text in stored.maps.items():
        index, item = split_place(place)
        if item is not None:
            by_node.setdefault(index, []).append((item, text))
    for index, text in stored.maps.items():
        if index >= PLACES:
            continue
        counts, node = MapCounts.parse(text), run.nodes[index]
        if run.max_bytes is not None:
            node.size = counts.kept_bytes
        if counts.is_reused:
            node.items = MapState.reused(counts.total, node.output)
            continue
        node.items = items = MapState(counts.total)
        for item, state in by_node.get(index, ()):
            one = node_of(state.decode())
            if (ending := ends.get(b"%d" % item_place(index, item))) is not None:
                fill_end(one, ending, run.graph)
            items.begin(item, one)
        for place in stored.ended(index):
            record = records.get(place)
            if record is None:
                items.statuses[place % PLACES] = ENDED[NodeStatus.COMPLETED]
            else:
                add_ended(items, place, record)
        items.running, items.completed = counts.running, counts.completed
        items.failed = counts.failed
        items.ready = sorted(i for i, one in items.in_flight.items() if one.phase is Phase.HELD)
        if node.status is NodeStatus.COMPLETED:
            node.output = items.outputs


def add_ended(items: MapState, place: int, record: bytes, max_output: int | None = None) -> None:
    """Add an item that has ended. An output larger than `max_output` becomes a reference."""
    item = place % PLACES
    status, end, output = item_end(record)
    items.statuses[item] = ENDED[status]
    items.ended[item] = end
    if output is not None:
        is_large = max_output is not None and len(output) > max_output
        reference = OutputReference(len(output), place)
        items.outputs[item] = reference if is_large else orjson.loads(output)


def item_end(record: bytes) -> tuple[NodeStatus, ItemEnd, bytes | None]:
    """Decode the record of an item that has ended; behind it the output as JSON, if it has one."""
    head, output = split_record(record)
    parts = head.decode().split(SEPARATOR, 7)
    letter, epoch, attempt, worker, started, finished = parts[:6]
    reason, error = parts[6:] if len(parts) == 8 else ("", "")
    end = ItemEnd(
        int(epoch),
        int(attempt),
        worker or None,
        float(started) if started else None,
        float(finished),
        orjson.loads(error) if error else None,
        Reason(reason) if reason else None,
    )
    return node_status(letter), end, output


def output_in(record: bytes | None) -> bytes:
    """The output of an item that has ended, as JSON: null if it has none."""
    if record is None or record[:1] != b"C":
        return b"null"
    return record[record.index(b"\n", RECORD_REST_OFFSET) + 1 :]


def output_of_ended(item: int, counts: bytes | None, record: bytes | None) -> bytes | None:
    """The output, as JSON, of an item that is not in flight; None if it is not completed. `counts`
    are those of its node: the record of an item that was not begun is left from an earlier
    epoch."""
    is_begun = counts is not None and item < MapCounts.parse(counts).next
    return output_in(record) if is_begun and record is not None and record[:1] == b"C" else None


def refer_to_large_maps(run: RunState, stored: StoredMaps, room: ReadBudget) -> None:
    """Replace the outputs of completed mapped nodes by references where there is no room for
    them."""
    for index, text in stored.maps.items():
        if index < PLACES and run.nodes[index].status is NodeStatus.COMPLETED:
            counts = MapCounts.parse(text)
            if not counts.is_reused and counts.output_size > room.each:
                run.nodes[index].output = OutputReference(counts.output_size, index)

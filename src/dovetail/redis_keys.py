"""The prefix of every key, put before it in each command, at the one place where commands leave.

A command whose keys are not known here is refused where there is a prefix: a key without it would
be somebody else's, or be refused by an ACL. Scripts get all their keys as KEYS. What it must not
know: what any key is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dovetail.cluster import EXEC, MULTI

Command = tuple[Any, ...] | bytes

# fmt: off
FIRST = frozenset({
    "EXPIRE", "GET", "HDEL", "HEXISTS", "HGET", "HGETALL", "HINCRBY", "HKEYS", "HLEN", "HMGET",
    "HSET", "HSETNX", "HSTRLEN", "HVALS", "INCR", "LLEN", "LPUSH", "LRANGE", "LTRIM", "PEXPIRE",
    "PTTL", "RPUSH", "SADD", "SCARD", "SET", "SMEMBERS", "SREM", "TTL", "TYPE", "XACK", "XADD",
    "XAUTOCLAIM", "XCLAIM", "XDEL", "XLEN", "XPENDING", "XRANGE", "XREVRANGE", "XTRIM", "ZADD",
    "ZCARD", "ZCOUNT", "ZMSCORE", "ZRANGE", "ZRANGEBYLEX", "ZRANGEBYSCORE", "ZRANK", "ZREM",
    "ZREMRANGEBYRANK", "ZREMRANGEBYSCORE", "ZREVRANGE", "ZREVRANGEBYLEX", "ZREVRANGEBYSCORE",
    "ZSCAN", "ZSCORE",
})
SECOND = frozenset({"XGROUP", "XINFO"})
EVERY = frozenset({"DEL", "EXISTS", "UNLINK"})
NONE = frozenset({
    "ASKING", "BGREWRITEAOF", "CLIENT", "CLUSTER", "CONFIG", "ECHO", "INFO", "PING", "ROLE",
    "SCRIPT", "TIME", "WAIT",
})
# fmt: on


class UnknownKeys(ValueError):
    """A command that this table does not know."""


class Keys:
    """Puts a prefix before the keys of commands, and takes it from names that come back."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._tag = f"{{{prefix}wf:"

    def all_of(self, commands: Sequence[Command]) -> list[Command]:
        return [self.of(command) for command in commands]

    def of(self, command: Command) -> Command:
        if isinstance(command, bytes):
            return self._sent(command)
        name = command[0]
        if name in FIRST:
            return (name, self.key(command[1]), *command[2:])
        if name in ("EVALSHA", "EVAL"):
            end = 3 + int(command[2])
            return (*command[:3], *map(self.key, command[3:end]), *command[end:])
        if name in EVERY:
            return (name, *map(self.key, command[1:]))
        if name in SECOND:
            return (*command[:2], self.key(command[2]), *command[3:])
        if name in ("XREADGROUP", "XREAD"):
            first = command.index("STREAMS") + 1
            end = first + (len(command) - first) // 2
            return (*command[:first], *map(self.key, command[first:end]), *command[end:])
        if name == "SCAN":
            at = command.index("MATCH") + 1
            return (*command[:at], self.key(command[at]), *command[at + 1 :])
        if name in NONE:
            return command
        raise UnknownKeys(f"which words of {name} are keys is not known: see {__name__}")

    def key(self, key: Any) -> Any:
        if isinstance(key, bytes):
            return self.prefix.encode() + key.replace(b"{wf:", self._tag.encode())
        # A hash tag that is the name of another key is in the slot of that key, as it is now.
        return self.prefix + str(key).replace("{wf:", self._tag)

    def without(self, key: bytes) -> str:
        return key.decode().removeprefix(self.prefix).replace(self._tag, "{wf:")

    def _sent(self, command: bytes) -> bytes:
        """Of a command as it is sent: the second word of it."""
        if command in (MULTI, EXEC):
            return command
        count, size, name, _, key, rest = command.split(b"\r\n", 5)
        if name.decode() not in FIRST:
            raise UnknownKeys(f"which words of {name.decode()} are keys is not known")
        key = self.key(key)
        return b"\r\n".join((count, size, name, b"$%d" % len(key), key, rest))

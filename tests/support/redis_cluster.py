"""A Redis Cluster, and Sentinels around a master, of the tests' own: servers as in tests/support/redis_server.py."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import redis
from redis.crc import key_slot

from tests.support.proxy import calls_to
from tests.support.redis_server import RedisServer, free_port, is_free

SLOTS = 16384
NODE_TIMEOUT = 1.0
"""Seconds after which nodes, and Sentinels, take one that does not answer for dead."""
AT_ONCE = {"repl_diskless_sync_delay": "0"}
"""Masters do not wait for further replicas before they send one what they have."""
PATIENCE = 30.0
HIGHEST = 22_000
"""The highest port of a node: ten thousand above, it has another one."""


def eventually(condition: Callable[[], object], what: str) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(redis.RedisError):
            if condition():
                return
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited for {what} in vain")
        time.sleep(0.02)


class RedisCluster:
    """Masters that share the slots evenly, and for each so many replicas."""

    def __init__(self, masters: int = 3, replicas: int = 0, **options: str) -> None:
        self.nodes = [_node(**options) for _ in range(masters * (1 + replicas))]
        self.masters = self.nodes[:masters]
        self.url = f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in self.masters)}"
        try:
            self._join(masters)
        except BaseException:
            self.stop()
            raise

    def _join(self, masters: int) -> None:
        for place, node in enumerate(self.masters):
            self.say(node, "CLUSTER", "ADDSLOTS", *range(place * SLOTS // masters, (place + 1) * SLOTS // masters))
            self.say(node, "CLUSTER", "SET-CONFIG-EPOCH", place + 1)
        for node in self.nodes[1:]:
            self.say(self.nodes[0], "CLUSTER", "MEET", "127.0.0.1", node.port)
        eventually(lambda: all(self._knows(node) for node in self.nodes), "the nodes to meet")
        for place, replica in enumerate(self.nodes[masters:]):
            master = self.id_of(self.masters[place % masters])
            eventually(lambda node=replica, to=master: self.say(node, "CLUSTER", "REPLICATE", to), "a replica")  # type: ignore[misc]
        eventually(self.is_whole, "all slots to be served")

    def _knows(self, node: RedisServer) -> bool:
        return self.info(node)["cluster_known_nodes"] == str(len(self.nodes))

    def is_whole(self) -> bool:
        """Whether every node says that all slots are served, and every replica has its master's data."""
        return all(self.info(node)["cluster_state"] == "ok" and self._follows(node) for node in self.nodes)

    def _follows(self, node: RedisServer) -> bool:
        with node.client() as client:
            return client.info("replication").get("master_link_status", "up") == "up"

    def info(self, node: RedisServer) -> dict[str, str]:
        """What a node says about the cluster."""
        lines = self.say(node, "CLUSTER", "INFO")
        return dict(line.split(":") for line in (lines.decode() if isinstance(lines, bytes) else lines).split())

    def state(self, node: RedisServer) -> str:
        """What a node says about the state of the cluster: ok or fail."""
        return self.info(node)["cluster_state"]

    @staticmethod
    def is_master(node: RedisServer) -> bool:
        """Whether a node takes itself for a master."""
        with node.client() as client:
            return bool(client.info("replication")["role"] == "master")

    def replica_of(self, place: int) -> RedisServer:
        """The first replica of the master of a place."""
        return self.nodes[len(self.masters) + place]

    def swap(self, place: int) -> None:
        """The master of a place and its replica have changed places."""
        other = len(self.masters) + place
        self.nodes[place], self.nodes[other] = self.nodes[other], self.nodes[place]
        self.masters[place] = self.nodes[place]

    @staticmethod
    def say(node: RedisServer, *command: str | int) -> object:
        """What a node answers to a command."""
        with node.client() as client:
            client.response_callbacks.clear()
            return client.execute_command(*command)

    def id_of(self, node: RedisServer) -> str:
        """The name that a node has in the cluster."""
        name = self.say(node, "CLUSTER", "MYID")
        return name.decode() if isinstance(name, bytes) else str(name)

    def master_of(self, key: str) -> RedisServer:
        """The node that holds a key, if no slot has moved."""
        return self.masters[key_slot(key.encode()) * len(self.masters) // SLOTS]

    def keys(self) -> dict[bytes, bytes]:
        """All keys and values, of all masters."""
        found = {}
        for node in self.masters:
            with node.client() as client:
                for key in client.keys("*"):
                    found[key] = client.get(key)
        return found

    def calls(self) -> int:
        """Script calls that all nodes have carried out."""
        return sum(calls_to(node) for node in self.nodes)

    def redirections(self) -> int:
        """How often nodes have said that a slot, or a part of it, is elsewhere."""
        count = 0
        for node in self.nodes:
            with node.client() as client:
                errors = client.info("errorstats")
            for name in ("MOVED", "ASK", "TRYAGAIN"):
                said = errors.get(f"errorstat_{name}", {"count": 0})
                count += said["count"] if isinstance(said, dict) else int(said.partition("=")[2])  # before redis-py 6.3
        return count

    def begin_migration(self, slot: int, source: RedisServer, target: RedisServer) -> None:
        """A slot is moving from a node to another one; keys that do not exist yet begin at the target.

        First the nodes have to agree. One that missed an epoch of another would claim the slot with an older one, in vain.
        """
        eventually(self._agrees, "all nodes to know who holds what")
        self.say(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", self.id_of(source))
        self.say(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", self.id_of(target))

    def _agrees(self) -> bool:
        return len({frozenset(self._claims(node)) for node in self.nodes}) == 1

    def _claims(self, node: RedisServer) -> Iterator[tuple[str, ...]]:
        said = self.say(node, "CLUSTER", "NODES")
        for line in (said.decode() if isinstance(said, bytes) else str(said)).splitlines():
            name, _, _, _, _, _, epoch, _, *slots = line.split()
            yield name, epoch, *(each for each in slots if not each.startswith("["))

    def migrate_keys(self, slot: int, source: RedisServer, target: RedisServer) -> int:
        """Move the keys of a slot; how many there were."""
        moved = 0
        while keys := self.say(source, "CLUSTER", "GETKEYSINSLOT", slot, 10):
            assert isinstance(keys, list)
            self.say(source, "MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
            moved += len(keys)
        return moved

    def end_migration(self, slot: int, target: RedisServer) -> None:
        """All nodes are told where the slot is now, the target first."""
        name = self.id_of(target)
        for node in sorted(self.masters, key=lambda node: node is not target):
            self.say(node, "CLUSTER", "SETSLOT", slot, "NODE", name)

    def stop(self) -> None:
        """Stop all servers and remove their folders."""
        for node in self.nodes:
            node.stop()


class Sentinels:
    """A master with a replica, and Sentinels that watch them. The master's name is ``limits``."""

    def __init__(self, sentinels: int = 3) -> None:
        self.master = RedisServer(port=str(free_port()), **AT_ONCE)
        self.replica = RedisServer(port=str(free_port()), replicaof=f"127.0.0.1 {self.master.port}", **AT_ONCE)
        self.servers = [self.master, self.replica]
        self.sentinels: list[RedisServer] = []
        quorum = sentinels // 2 + 1
        eventually(self._replicates, "the replica")
        for _ in range(sentinels):
            self.sentinels.append(_sentinel(self.master, quorum))
        eventually(lambda: all(self._sees_all(sentinel) for sentinel in self.sentinels), "the Sentinels to find each other")
        places = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        self.url = f"redis+sentinel://{places}/limits"

    def _replicates(self) -> bool:
        with self.replica.client() as client:
            return bool(client.info("replication").get("master_link_status") == "up")

    def _sees_all(self, sentinel: RedisServer) -> bool:
        with sentinel.client() as client:
            state = client.sentinel_master("limits")
        return state["num-slaves"] == 1 and state["num-other-sentinels"] == len(self.sentinels) - 1

    def promoted(self) -> bool:
        """Whether the replica has become the master, and Sentinels say so."""
        with self.replica.client() as client, self.sentinels[0].client() as sentinel:
            role = client.info("replication")["role"]
            return role == "master" and sentinel.sentinel_get_master_addr_by_name("limits")[1] == self.replica.port

    def swap(self) -> None:
        """The master and its replica have changed places; wait until every Sentinel knows."""
        self.master, self.replica = self.replica, self.master
        eventually(self._is_known, "all Sentinels to know of the new master")

    def is_whole(self) -> bool:
        """Whether the replica follows the master, and every Sentinel goes by that master."""
        return self._replicates() and self._is_known()

    def _is_known(self) -> bool:
        return all(map(self._goes_by_master, self.sentinels))

    def _goes_by_master(self, sentinel: RedisServer) -> bool:
        with sentinel.client() as client:
            state = client.sentinel_master("limits")
        return bool(state["port"] == self.master.port and state["flags"] == "master")

    def stop(self) -> None:
        """Stop all servers and remove their folders."""
        for server in (*self.sentinels, *self.servers):
            server.stop()


def _node(**options: str) -> RedisServer:
    timeout = str(int(NODE_TIMEOUT * 1000))
    port = free_port()
    while port > HIGHEST or not is_free(port + 10_000):  # where nodes speak with each other
        port = free_port()
    return RedisServer(cluster_enabled="yes", cluster_node_timeout=timeout, port=str(port), **AT_ONCE, **options)


def _sentinel(master: RedisServer, quorum: int) -> RedisServer:
    server = RedisServer(start=False, port=str(free_port()))
    timeout = int(NODE_TIMEOUT * 1000)
    lines = [
        f"port {server.port}",
        "bind 127.0.0.1",
        f"unixsocket {server.socket}",
        f"dir {server.folder}",
        f"sentinel monitor limits 127.0.0.1 {master.port} {quorum}",
        f"sentinel down-after-milliseconds limits {timeout}",
        "sentinel failover-timeout limits 2000",  # an election without a winner is repeated after twice this
    ]
    configuration = server.folder / "sentinel.conf"
    configuration.write_text("\n".join(lines) + "\n")
    server.run_as("--sentinel", str(configuration))
    return server


@contextlib.contextmanager
def running(servers: RedisCluster | Sentinels) -> Iterator[RedisCluster | Sentinels]:
    """Stops them at the end."""
    try:
        yield servers
    finally:
        servers.stop()

"""What can go wrong where several servers are behind a store: Sentinels around a master, or a cluster.

As in causes.py; but who promotes a replica decides when the fault is over, so some causes tell how to see that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.faults.causes import Over, until
from tests.faults.places import HIT, hit_slots
from tests.faults.stages import Stage
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_server import RedisServer

HALF_WAY = 0.3
"""Seconds for which a slot is at two nodes at once."""
TWO_MASTERS = 0.5
"""Seconds for which an old master takes itself for the master still, and nobody should ask it."""

# --- Sentinels --------------------------------------------------------------------------------------------------------


@contextmanager
def master_killed(stage: Stage) -> Iterator[Over]:
    """The master crashes; over when Sentinels have promoted its replica. The old master comes back as a replica."""
    several = stage.several
    several.master.kill()
    yield several.promoted
    several.swap()
    several.replica.start(replicaof=f"127.0.0.1 {several.master.port}")


@contextmanager
def master_frozen(stage: Stage) -> Iterator[Over]:
    """The master stands still; later it comes back, takes itself for the master that another one is, and is demoted."""
    several, old = stage.several, stage.several.master
    with old.frozen():
        yield several.promoted
        several.swap()
    time.sleep(TWO_MASTERS)
    with old.client() as client:  # what Sentinels do, too, but only after eight seconds
        client.replicaof("127.0.0.1", str(several.master.port))
        client.client_kill_filter(_type="normal", skipme=True)


# --- a cluster --------------------------------------------------------------------------------------------------------


@contextmanager
def node_killed(stage: Stage) -> Iterator[None]:
    """A node without a replica crashes and is started again, empty; over when it takes part in the cluster again."""
    cluster, node = stage.several, stage.several.masters[HIT]
    node.kill()
    try:
        yield
    finally:
        node.start()
        until(lambda: cluster.state(node) == "ok")


@contextmanager
def node_failed_over(stage: Stage) -> Iterator[Over]:
    """A node crashes; over when its replica has its slots. The old node comes back as a replica."""
    cluster = stage.several
    old, new = cluster.masters[HIT], cluster.replica_of(HIT)
    old.kill()
    yield lambda: cluster.is_master(new) and cluster.state(new) == "ok"
    old.start()
    cluster.swap(HIT)


@contextmanager
def cluster_down(stage: Stage) -> Iterator[None]:
    """A cluster that wants all of its slots served has lost a node, and no node serves any; over when all of them do."""
    cluster, lost = stage.several, stage.several.masters[HIT]
    _configure(cluster, "yes")
    lost.kill()
    until(lambda: all(cluster.state(node) == "fail" for node in cluster.nodes if node is not lost))
    try:
        yield
    finally:
        lost.start()
        until(cluster.is_whole)
        _configure(cluster, "no")


@contextmanager
def slots_moved(stage: Stage) -> Iterator[None]:
    """The slots of some streams' buckets move to another node, and back again at the end; each is half moved for a while."""
    cluster, moving = stage.several, hit_slots(stage.keys)
    here, there = cluster.masters[HIT], cluster.masters[HIT + 1]
    _move(cluster, moving, here, there)
    yield
    _move(cluster, moving, there, here)


def _move(cluster: RedisCluster, slots: set[int], source: RedisServer, target: RedisServer) -> None:
    """Move slots, all of them step by step; after each step but the last one things stay as they are for a while."""
    for slot in slots:
        cluster.begin_migration(slot, source, target)
    time.sleep(HALF_WAY)
    for slot in slots:
        cluster.migrate_keys(slot, source, target)
    time.sleep(HALF_WAY)
    for slot in slots:
        cluster.end_migration(slot, target)


def _configure(cluster: RedisCluster, coverage: str) -> None:
    """Say whether nodes serve anything while slots are missing."""
    for node in cluster.nodes:
        with node.client() as client:
            client.config_set("cluster-require-full-coverage", coverage)

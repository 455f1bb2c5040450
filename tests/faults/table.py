"""The faults, one line each."""

from __future__ import annotations

from tests.faults import causes, causes_of_several as several
from tests.faults.app import BURST
from tests.faults.experiment import Fault
from tests.faults.link import Cutting, Garbling, Late, Swallowing, Trickling

LAG = 2
"""Requests on the same key that a replica may not have heard of when it is promoted."""
FAULTS = [
    Fault("killed and restarted", causes.killed, forgets=BURST),
    Fault("killed, restarted at once", causes.killed, lasts=0, forgets=BURST),
    Fault("frozen", causes.frozen, lasts=1.5),
    Fault("SCRIPT FLUSH", causes.told("SCRIPT FLUSH"), lasts=0.5, degrades=0),
    Fault("FLUSHALL", causes.told("FLUSHALL"), lasts=0.5, degrades=0, forgets=BURST),
    Fault("CLIENT KILL", causes.told("CLIENT KILL TYPE normal SKIPME yes"), lasts=0.5, degrades=0),
    Fault("CLIENT PAUSE", causes.paused(1.5)),
    Fault("BUSY", causes.busy),
    Fault("OOM", causes.full, degrades=0.5, local=True),
    Fault("LOADING", causes.loading, lasts=1.0),
    Fault("READONLY", causes.replica(stale=True)),
    Fault("MASTERDOWN", causes.replica(stale=False)),
    Fault("another password", causes.locked),
    Fault("too many clients", causes.crowded),
    Fault("no file descriptors", causes.out_of_files),
    Fault("absent at start", causes.absent, way="absent", lead=0),
    Fault("failover", causes.failed_over, way="linked", forgets=LAG),
    Fault("switchover", causes.switched_over, way="linked", lasts=0, forgets=LAG),
    Fault("replies 50 ms late", causes.carried(Late(0.05)), way="linked", degrades=0, waits=True),
    Fault("replies 0.3 s late", causes.carried(Late(0.3)), way="linked"),
    Fault("replies 1 s late", causes.carried(Late(1.0)), way="linked"),
    Fault("replies byte by byte", causes.carried(Trickling(0.02)), way="linked"),
    Fault("cut in mid-reply", causes.carried(Cutting()), way="linked"),
    Fault("garbage", causes.carried(Garbling(bytes(range(128, 256)))), way="linked"),
    Fault("another's replies", causes.carried(Garbling(b"*1\r\n:1\r\n")), way="linked"),
    Fault("black hole", causes.carried(Swallowing()), way="linked"),
    Fault("black hole, to the last", causes.swallowed_to_the_last, way="linked"),
    Fault("half-open connections", causes.half_open, way="linked", lasts=0),
    Fault("clock 1 h forwards", causes.clock_stepped(3600), way="clocked", lasts=0.7, degrades=0, forgets=BURST),
    Fault("clock 1 h back", causes.clock_stepped(-3600), way="clocked", lasts=0.7, degrades=0, forgets=BURST),
    Fault("Sentinels: master killed", several.master_killed, way="sentinel", lasts=0, forgets=LAG),
    Fault("Sentinels: master frozen", several.master_frozen, way="sentinel", lasts=0, forgets=LAG),
    Fault("cluster: node killed", several.node_killed, way="cluster", lasts=1.5, forgets=BURST, partly=True),
    Fault("cluster: slots moved", several.slots_moved, way="cluster", lasts=0.3, degrades=0),
    Fault("cluster: CLUSTERDOWN", several.cluster_down, way="cluster", forgets=BURST),
    Fault("cluster: failover", several.node_failed_over, way="replicated", lasts=0, forgets=LAG, partly=True),
]
UNDER_THREADS = [
    "killed and restarted",
    "frozen",
    "READONLY",
    "another password",
    "black hole",
    "black hole, to the last",
    "replies byte by byte",
    "Sentinels: master killed",
    "cluster: node killed",
    "cluster: slots moved",
]
"""Those that are tried where threads wait for Redis, too."""

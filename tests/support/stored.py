"""The buckets that a memory store keeps, for tests that look at them."""

from __future__ import annotations

from limitgate import MemoryStore
from limitgate.stores.packed import Entry


def buckets(store: MemoryStore) -> dict[str, Entry]:
    """Every bucket under its key; those that newcomers share are not among them."""
    return {key: store._bucket(key, value) for shard in store._shards for key, value in shard.items()}

"""Redis Cluster: the slot map and the routes of redirected calls, without I/O."""

"""From a store URL to connections, and checks of each new connection."""

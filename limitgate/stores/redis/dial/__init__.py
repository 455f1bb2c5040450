"""From a store URL to connections, and what a server says of itself on a new one."""

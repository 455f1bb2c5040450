"""What passes on a connection to Redis: bytes of calls and replies. No I/O."""

"""Encoding and decoding of calls and replies on a connection to Redis, without I/O."""

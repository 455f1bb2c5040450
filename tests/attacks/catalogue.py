"""Every attack of the table: importing this enters them all."""

from tests.attacks import addresses, forwarding, malformed, paths, values

__all__ = ["addresses", "forwarding", "malformed", "paths", "values"]

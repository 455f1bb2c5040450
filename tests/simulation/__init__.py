"""LimitGate in a world of seeded chance: several processes, a network and servers on virtual time, see `__main__`."""

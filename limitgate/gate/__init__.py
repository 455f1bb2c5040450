"""Decides about requests before and while the application runs them.

A plan charges the buckets of all rules that apply. The store carries it out and returns a reading. Almost all plans are plain:
they either fit now or don't. An admission is the state of one request, a turn is a booked time, a permit is a place under an
adaptive limit, and a slot is a place under a concurrency limit.
"""

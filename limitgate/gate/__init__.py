"""Decides about requests before and while the application runs them.

The store carries out a plan, which charges the buckets of all rules that apply, and returns a reading. Plain plans either fit
now or don't. An admission is the state of one request, a turn is a booked time, a permit is a place under an adaptive limit,
and a slot is a place under a concurrency limit.
"""

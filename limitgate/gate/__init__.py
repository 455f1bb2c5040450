"""Decides about requests before and while the application runs them.

The store carries out a *plan*, which charges the buckets of all rules that apply, and returns a *reading*. An *admission* is
the state of one request, a *turn* a booked time, a *permit* a place under an adaptive limit, a *slot* a place under a
concurrency limit.
"""

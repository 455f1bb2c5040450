"""Buckets in Redis: what the drivers in aio/ and threads/ share."""

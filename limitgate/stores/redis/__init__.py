"""Buckets in Redis: code that aio/ and threads/ share."""

"""Buckets in Redis: shared by aio/ and threads/."""

"""Tests of limitgate/forward."""

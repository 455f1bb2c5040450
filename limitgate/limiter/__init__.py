"""The engine without HTTP."""

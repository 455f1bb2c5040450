"""Writes the parts of docs/ that follow from the code: ``make docs``."""

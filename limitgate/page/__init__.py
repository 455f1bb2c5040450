"""The live page: one HTML document about refusals and processes."""

from limitgate.page.asgi import Page
from limitgate.page.this_machine import this_machine
from limitgate.page.wsgi import PageWSGI

__all__ = ["Page", "PageWSGI", "this_machine"]

"""The live page: one HTML document about refusals and processes.

asgi.py          `Page`, with server-sent events
wsgi.py          `PageWSGI`, which browsers poll
site.py          options, routes, headers and responses; no I/O
screen.py        the figures as shown
explaining.py    explains a request, or a refusal's id
actions.py       ban, pardon and reset, safe from other sites
this_machine.py  a guard for browsers on this machine
stopping.py      detects that the server stops
document.py      combines page.html, page.css and page.js
"""

from limitgate.page.asgi import Page
from limitgate.page.this_machine import this_machine
from limitgate.page.wsgi import PageWSGI

__all__ = ["Page", "PageWSGI", "this_machine"]

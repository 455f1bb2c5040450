"""The live page: one HTML document that shows what all processes of a service limit, and how it goes.

asgi.py        `Page`, with events that the server sends
wsgi.py        `PageWSGI`, which browsers poll
site.py        what both have in common: options, routes, headers; no I/O
screen.py      the figures as the page shows them
explaining.py  explains a request, or the id of a refusal
actions.py     ban, pardon and reset, with their protection against other sites
this_machine.py  a guard for browsers on this machine
stopping.py    knows when the server is to end
document.py    puts the document together from page.html, page.css and page.js
"""

from limitgate.page.asgi import Page
from limitgate.page.this_machine import this_machine
from limitgate.page.wsgi import PageWSGI

__all__ = ["Page", "PageWSGI", "this_machine"]

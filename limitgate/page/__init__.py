"""The live page: one HTML document that shows who is refused, by which rule, and whether all processes are well.

asgi.py        `Page`, with events that the server sends
wsgi.py        `PageWSGI`, which browsers poll
site.py        options, routes, headers and responses, for both; no I/O
screen.py      the figures as the page shows them
explaining.py  explains a request, or the id of a refusal
actions.py     ban, pardon and reset, with their protection against other sites
this_machine.py  a guard for browsers on this machine
stopping.py    detects that the server is stopping
document.py    puts the document together from page.html, page.css and page.js
"""

from limitgate.page.asgi import Page
from limitgate.page.this_machine import this_machine
from limitgate.page.wsgi import PageWSGI

__all__ = ["Page", "PageWSGI", "this_machine"]

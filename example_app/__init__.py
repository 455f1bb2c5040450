"""A small service behind LimitGate: `main` on ASGI, `wsgi` on WSGI."""

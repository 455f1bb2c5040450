"""A Django project of its own: a throttle of REST framework limits logins, a rule everything."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from django.test import override_settings
from django.urls import path

from tests.faults.overload import apps
from tests.support import django_app

# isort: split
from rest_framework.renderers import JSONRenderer
from rest_framework.response import Response
from rest_framework.views import APIView

from limitgate.django.rest import Throttle


class Spaced(JSONRenderer):
    """JSON as the standard library writes it."""

    compact = False


class Login(Throttle):
    """The limit of logins."""

    limits = (apps.LOGIN,)
    key = ("ip",)


class LoginView(APIView):
    """Where logins are tried."""

    authentication_classes = ()
    throttle_classes = (Login,)
    renderer_classes = (Spaced,)

    def get(self, request: Any) -> Response:
        decision = getattr(request._request, "limitgate", None)
        return Response({"degraded": bool(decision and decision.degraded)})


def project(store: Any) -> override_settings:
    """The project's settings."""

    def hello(request: Any) -> HttpResponse:
        decision = getattr(request, "limitgate", None)
        return HttpResponse(apps.answer(request.path, decision, store), content_type="application/json")

    free = [path(name, hello) for name in ("hello", "block", "state", "trouble/on", "trouble/off")]
    return override_settings(
        ROOT_URLCONF=(path("login", LoginView.as_view()), *free),
        MIDDLEWARE=[django_app.GATE, "django.middleware.common.CommonMiddleware"],
        LIMITGATE={"rules": [apps.OF_ALL, *apps.FREE], "store": store},
    )


def asgi() -> Any:
    """The project on asyncio."""
    project(apps.asgi_store()).enable()
    return django_app.get_asgi_application()


def wsgi() -> Any:
    """The project under threads."""
    project(apps.wsgi_store()).enable()
    return django_app.get_wsgi_application()

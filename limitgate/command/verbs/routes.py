"""The verb ``routes``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import click

from limitgate.command.applications import (
    EXPECTED,
    READABLE,
    application,
    failing,
    gates,
    inwards,
    is_of_django,
    look_here,
    routes_of,
    rules_named,
)
from limitgate.command.output import FOUND, json_option, print_json, say
from limitgate.routes import starlette
from limitgate.routes.overview import Entry, Listed, Mounted, entries, notes_on, overview, unmatched
from limitgate.rules.files import rules_of
from limitgate.rules.rule import Rule, RuleSet
from limitgate.rules.settings import GateSettings


class _Application(NamedTuple):
    routes: list[Listed]
    rule_sets: list[RuleSet]
    """Rule sets of the gates, outermost first."""
    mounted: list[Mounted]


@click.command("routes")
@click.argument("name", metavar="MODULE:APP")
@click.option("--rules", metavar="PATH", help="Rule file or folder, instead of the application's rules.")
@json_option
@click.pass_context
def verb(ctx: click.Context, name: str, rules: str | None, *, as_json: bool) -> None:
    """List every route of an application with its limits, and the rules that match no route.

    MODULE:APP is an application of Starlette, FastAPI or Flask, or Django's from wsgi.py or asgi.py, or the module of
    Django's settings, such as shop.settings. Exit status 1: a rule matches no route.

    For example: limitgate routes example_app.main:app
    """
    if not name:
        raise click.UsageError(f"the name of the application is empty, {EXPECTED}")
    app = application(name) if ":" in name else None
    with failing(name, "", READABLE):
        found = _django(name) if app is None else _application(app)
    if not found.routes:
        raise click.UsageError(f"{name} shows no routes, expected an application of Starlette, FastAPI, Flask or Django")
    if rules:
        found = _Application(found.routes, [rules_named(rules)], [])
    rule_sets, mounted = found.rule_sets or [RuleSet([])], found.mounted
    if not (found.rule_sets or mounted):
        say("limitgate: no LimitGate found around the application, so only decorators are listed; pass --rules", err=True)
    idle = [
        each
        for its_rules, routes in [*[(each, found.routes) for each in rule_sets], *mounted]
        for each in unmatched(its_rules, routes)
    ]
    if as_json:
        print_json(_as_json(entries(rule_sets, found.routes, mounted), idle))
    else:
        say(*overview(rule_sets, found.routes, mounted).split("\n"))
    ctx.exit(FOUND if idle else 0)


def _as_json(told: list[Entry], idle: list[tuple[str, Rule]]) -> dict[str, Any]:
    return {
        "routes": [_entry(each) for each in told],
        "unmatched": [
            {
                "rule": rule.name,
                "tier": tier,
                "path": list(rule.paths),
                "methods": sorted(rule.methods) if rule.methods else None,
            }
            for tier, rule in idle
        ],
    }


def _entry(entry: Entry) -> dict[str, Any]:
    route = {"route": entry.template, "methods": entry.methods, "tiers": entry.tiers}
    if entry.applied is None:
        return {**route, "rule": None, "limits": [], "key": [], "exempt": False, "notes": []}
    rule = entry.applied.rule
    if rule == "exempt":
        return {**route, "rule": "@exempt", "limits": [], "key": [], "exempt": True, "notes": []}
    limits = list(map(str, rule.every_limit))
    key = list(rule.counted_by) if rule.has_limits and rule.has_counts else []
    return {**route, "rule": rule.name, "limits": limits, "key": key, "exempt": rule.exempt, "notes": notes_on(entry.applied)}


def _application(app: Any) -> _Application:
    if any(map(is_of_django, inwards(app))):
        return _Application(_django(None).routes, [each.rules for each in gates(app)], [])
    return _Application(routes_of(app), [each.rules for each in gates(app)], list(_mounted(app, frozenset())))


def _mounted(app: Any, around: frozenset[int]) -> Iterator[Mounted]:
    for template, within in starlette.mounts_of(app):
        routes = starlette.routes_of(within)
        if id(within) in around or not routes:
            continue
        yield from [(each.rules, [_below(template, route) for route in routes]) for each in gates(within)]
        for rules, further in _mounted(within, around | {id(within)}):
            yield rules, [_below(template, route) for route in further]


def _below(template: str, route: Listed) -> Listed:
    return route._replace(template=f"{template}{route.template}")


def _django(settings: str | None) -> _Application:
    if settings is not None:
        look_here()
        os.environ["DJANGO_SETTINGS_MODULE"] = settings
    with failing(str(settings), "", "MODULE:APP, or the module of Django's settings"):
        import django.conf

        django.setup()  # runs the settings
    from limitgate.django.middleware import options
    from limitgate.routes.django import routes_of as routes_of_django

    if not hasattr(django.conf.settings, "ROOT_URLCONF"):
        raise click.UsageError(f"{settings} has no ROOT_URLCONF, expected MODULE:APP, or the module of Django's settings")
    chosen = GateSettings(**options())
    return _Application(routes_of_django(), [rules_of(chosen.rules)] if chosen.rules is not None else [], [])

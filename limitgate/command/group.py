"""The command and its verbs. Maps errors to exit statuses."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.resources import files
from typing import Any

import click

from limitgate.command.output import FOUND, INTERRUPTED, NO_READER, NO_STORE, WRONG_USAGE, Warnings, say, write
from limitgate.errors import ConfigError, StoreError
from limitgate.messages.text import meant, printable

VERBS = {
    "check": "Check rule files and print every error.",
    "schema": "Print the JSON Schema of a rule file, for editors.",
    "explain": "Explain how the service would decide on a request, and why.",
    "routes": "List every route of an application with its limits.",
    "doctor": "Examine the versions, options and store of a service.",
    "doc": "Explain a code of a log line, such as LG006.",
    "replay": "Send an access log through rules: what would have been refused?",
    "peek": "Show one client's state in the store.",
    "reset": "Reset one client's usage.",
    "ban": "Ban one client.",
    "pardon": "Lift a ban.",
    "bans": "List banned clients, and why.",
    "budget": "Show how much of a language model budget is used and reserved.",
    "serve": "Decide for a proxy: nginx, Caddy, Traefik, Envoy or HAProxy.",
    "status": "Show every process of a service: its rules, its store, its errors.",
    "top": "Show who is refused most, and who uses most, live.",
    "page": "Serve the live page, which shows the same in a browser.",
    "exporter": "Export the figures of all processes to Prometheus.",
}
"""``command/verbs/VERB.py`` defines ``verb``, except ``schema``."""
_MODULES = {"peek": "clients", "reset": "clients", "ban": "clients", "pardon": "clients", "bans": "clients"}
_MODULES |= {"status": "watch", "top": "watch"}
"""Modules that define several verbs, each under its own name."""


class _Verbs(click.Group):
    """Imports a verb when it runs, so that the command starts fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS or cmd_name in self.commands:
            return self.commands.get(cmd_name)
        module, name = (_MODULES[cmd_name], cmd_name) if cmd_name in _MODULES else (cmd_name, "verb")
        command: click.Command = getattr(import_module(f"limitgate.command.verbs.{module}"), name)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # click before 8.2 exits with 0.
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(WRONG_USAGE)
        for argument in args:
            _check_is_text(argument)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        near = None if args[0] in VERBS else meant(args[0], VERBS)
        if near is not None and not ctx.resilient_parsing:
            ctx.fail(f"No such command {args[0]!r:.80}, did you mean {near!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _told_at_the_end():
                return super().invoke(ctx)
        except ConfigError as error:
            for mistake in error.every:
                say(f"limitgate: {mistake}", err=True)
            ctx.exit(FOUND)
        except StoreError as error:
            say(f"limitgate: {error}", err=True)
            ctx.exit(NO_STORE)
        except click.ClickException as error:  # printed by click without escapes
            vars(error)["message"] = printable(error.message)
            raise
        except KeyboardInterrupt:
            say(err=True)  # the terminal shows ^C without a line break
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes the rest at exit
            ctx.exit(NO_READER)


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="limitgate", message="%(prog)s %(version)s")
def limitgate() -> None:
    """Check rules, explain decisions, replay access logs, and manage clients of a running service.

    Exit status 0: success; 1: a problem was found; 2: wrong usage; 3: the store does not answer.
    """


@limitgate.command("schema")
def _schema() -> None:
    """Print the JSON Schema of rule files, for completion and validation in editors.

    Keep it beside the rules, and start each file with: # yaml-language-server: $schema=rules.schema.json

    For example: limitgate schema > config/rules.schema.json
    """
    write((files("limitgate.rules") / "schema.json").read_text(encoding="utf-8").removesuffix("\n"))


def _check_is_text(argument: str) -> None:
    try:
        argument.encode()
    except UnicodeEncodeError:
        if os.path.lexists(argument) or os.path.lexists(argument.partition("=")[2]):
            return
        shown = os.fsencode(argument).decode("utf-8", "backslashreplace")
        message = f"'{shown:.80}' is not UTF-8, expected text in UTF-8; in a path, write such bytes as escapes like %E9"
        raise click.UsageError(message) from None


@contextmanager
def _told_at_the_end() -> Iterator[None]:
    """Print the service's warnings after a verb. A `StoreError` isn't printed twice."""
    log, warnings = logging.getLogger("limitgate"), Warnings()
    # Prevents Python from printing them itself.
    log.addHandler(warnings)
    try:
        yield
    except StoreError as error:
        warnings.records = [each for each in warnings.records if _reason(each) not in str(error)]
        raise
    finally:
        log.removeHandler(warnings)
        for line in dict.fromkeys(each.getMessage() for each in warnings.records):  # two gates may log the same
            say(line, err=True)


def _reason(record: logging.LogRecord) -> str:
    return str(record.args[-1] if isinstance(record.args, tuple) and record.args else record.msg)

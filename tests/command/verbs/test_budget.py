"""The verb budget: used, reserved, told by the provider, waiting."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import pytest
from click.testing import Result

from limitgate import Limiter, RedisStore
from limitgate.command.group import limitgate
from limitgate.httpx2 import RateLimitTransport
from limitgate.limiter import budget_texts
from limitgate.limiter.budget_texts import state_of_budget
from limitgate.limiter.calls import carry_out
from limitgate.llm import Budget, Usage
from limitgate.llm.keeper import keeper_of
from tests.support.command_line import CliRunner
from tests.support.doors import PATIENCE, until
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_server import RedisServer

QUESTION: Any = [{"role": "user", "content": "How many roads must a man walk down?"}]
SECRET = "sk-very-secret-key"
FIELDS = {
    "x-ratelimit-limit-tokens": "200000",
    "x-ratelimit-remaining-tokens": "150000",
    "x-ratelimit-reset-tokens": "15s",
}


class World:
    """Processes with budgets, and the command beside them."""

    def __init__(self, url: str) -> None:
        self.url, self.prefix = url, f"t{uuid4().hex}"
        self.stores: list[RedisStore] = []

    def limiter(self) -> Limiter:
        self.stores.append(RedisStore(self.url))
        return Limiter(self.stores[-1], key_prefix=self.prefix, timeout=5)

    def client(self, model_answers: Any = None, budget: Budget | None = None, **options: Any) -> Callable[..., object]:
        """A function that asks a model."""

        def answer(request: httpx2.Request) -> httpx2.Response:
            if model_answers is not None:
                assert model_answers.wait(PATIENCE)
            usage = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
            return httpx2.Response(200, json={"choices": [], "usage": usage}, headers=FIELDS, request=request)

        transport = RateLimitTransport(
            budget=budget or Budget(requests="500/minute", tokens="200000/minute"),
            limiter=self.limiter(),
            transport=httpx2.MockTransport(answer),
            **options,
        )
        http = httpx2.Client(transport=transport, headers={"Authorization": f"Bearer {SECRET}"})
        return lambda **body: http.post("http://api.test/v1/chat/completions", json=body).raise_for_status()

    def run(self, *words: str) -> Result:
        command = ["budget", "--store", self.url, "--key-prefix", self.prefix, "--timeout", "10", *words]
        return CliRunner().invoke(limitgate, command, catch_exceptions=False)

    def json(self, *words: str, status: int = 0) -> Any:
        result = self.run(*words, "--json")
        assert result.exit_code == status, result.output
        return json.loads(result.stdout)


@pytest.fixture(params=["single", "cluster"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    server: RedisServer | RedisCluster = request.getfixturevalue(
        "redis_server" if request.param == "single" else "redis_cluster"
    )
    world = World(server.url)
    yield world
    for store in world.stores:
        store.close()


def test_a_budget_while_requests_are_under_way(world: World) -> None:
    go = threading.Event()
    client = world.client(go)
    ask = {"model": "gpt-5", "messages": QUESTION, "max_tokens": 50_000}
    threads = [threading.Thread(target=client, kwargs=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: world.run("gpt-5").exit_code == 0 and world.json("gpt-5")["windows"][0]["reserved"] == 3)
    found = world.json("api.test gpt-5")
    assert found.keys() >= {"windows", "waiting"}
    requests, tokens = found["windows"]
    assert requests.keys() >= {"limit", "used", "reserved", "told", "reset_after"}
    assert (requests["kind"], requests["period"], requests["limit"], requests["told"]) == ("requests", 60, 500, None)
    assert (tokens["limit"], tokens["reserved"]) == (200_000, 3 * 50_009)
    assert 0 < tokens["used"] <= 3 * 50_009
    assert (found["waiting"], found["held"], found["pause"]) == (0, 3, 0)
    assert 0 <= found["reserved_ago"] < PATIENCE
    assert "\nreserved as of " in world.run("gpt-5").stdout
    go.set()
    for thread in threads:
        thread.join(PATIENCE)
    client(**ask)
    found = world.json("gpt-5")
    assert [window["reserved"] for window in found["windows"]] == [0, 0]
    assert (found["held"], found["reserved_ago"]) == (0, None)


def test_what_the_provider_says(world: World) -> None:
    client = world.client()
    client(model="gpt-5", messages=QUESTION)
    # The lower remainder holds. Told values are reported while requests are under way, or after a while.
    tokens = world.json("gpt-5")["windows"][1]
    assert tokens["used"] == pytest.approx(50_000, abs=5_000)
    shown = world.run("gpt-5")
    assert shown.exit_code == 0
    assert SECRET not in shown.output
    assert "tokens" in shown.output
    assert "0 requests wait\n" in shown.output


def test_keys_are_listed_without_credentials(world: World) -> None:
    assert world.run().stdout == "the store has no budgets of the last day\n"
    assert world.json() == []
    unknown = world.run("gpt-5")
    assert (unknown.exit_code, "the store has no budget of 'gpt-5'" in unknown.output) == (2, True)
    client = world.client()
    for model in ("gpt-5", "gpt-6"):
        client(model=model, messages=QUESTION)
    secret = world.client(budget=Budget(requests="5/minute", key=lambda request: request.headers["authorization"]))
    secret(model="gpt-5", messages=QUESTION)
    listed = world.json()
    assert [name.split()[::2] for name in listed[:2]] == [["api.test", "gpt-5"], ["api.test", "gpt-6"]]
    assert len(listed) == 3
    assert SECRET not in world.run().output
    assert listed[2] == "Bea…key"
    ambiguous = world.run("api.test")
    assert ambiguous.exit_code == 2
    assert "2 budgets have the words 'api.test', expected one of" in ambiguous.output
    assert world.run(listed[1]).exit_code == 0
    # Who knows the key may use it.
    assert world.json(f"Bearer {SECRET}")["windows"][0]["used"] == 1


def test_a_budget_that_is_used_up(world: World) -> None:
    plan = Budget(tokens="1000/day", key=lambda _: "team", share=lambda body: body["user"], hold=None)
    body = {"messages": QUESTION, "max_tokens": 2000, "user": "benjamin"}
    limiter = world.limiter()
    kept = plan.reserve(limiter, body)
    assert world.json("team", status=1)["windows"][0]["used"] == 1000
    stop = threading.Thread(target=lambda: plan.reserve(limiter, body, timeout=100_000).cancel(), daemon=True)
    stop.start()
    until(lambda: world.json("team", status=1)["waiting"] == 1)
    until(lambda: world.json("team", status=1)["tenants"] == {"be…in": 1})
    shown = world.run("team")
    assert (shown.exit_code, "1 request waits, of be…in (1)\n" in shown.stdout) == (1, True)
    kept.settle(Usage(0, 0))
    stop.join(PATIENCE)
    assert not stop.is_alive()


def test_a_request_that_waits_no_more_is_not_shown_though_its_process_has_reported_it(world: World) -> None:
    plan, limiter = Budget(tokens="1000/day", key=lambda _: "team", hold=None), world.limiter()
    body = {"messages": QUESTION, "max_tokens": 2000}
    kept = plan.reserve(limiter, body)
    wait = threading.Thread(target=lambda: plan.reserve(limiter, body, timeout=100_000).cancel(), daemon=True)
    wait.start()
    until(lambda: [row.waiting for row in carry_out(limiter, state_of_budget(limiter, "team")).live] == [1])
    keeper_of(limiter).reporting = lambda _: iter(())  # type: ignore[method-assign]  # as if it were killed
    kept.settle(Usage(0, 0))
    wait.join(PATIENCE)
    found = carry_out(limiter, state_of_budget(limiter, "team"))
    assert (found.in_line, found.waiting) == (0, 0)
    assert world.json("team")["waiting"] == 0


def test_a_pause(world: World) -> None:
    limiter = world.limiter()
    plan = Budget(tokens="1000/day", key=lambda _: "team")
    plan.reserve(limiter, {"messages": QUESTION}).cancel()
    limiter.ban("team", 60)
    assert world.json("team", status=1)["pause"] == pytest.approx(60, abs=5)
    assert "paused for" in world.run("team").stdout


def test_reservations_of_a_process_that_has_ended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_texts, "_BEATS", 1)  # a report that is not repeated holds for a second
    limiter = world.limiter()
    Budget(tokens="1000/day", key=lambda _: "team", hold="1h").reserve(limiter, {"messages": QUESTION, "max_tokens": 100})
    until(lambda: world.json("team")["windows"][0]["reserved"] == 0)
    assert world.json("team")["held"] == 1
    assert "1 more reservation may belong to processes that have ended\n" in world.run("team").stdout


def test_wrong_usage(tmp_path: Path) -> None:
    run = CliRunner().invoke
    assert run(limitgate, ["budget", "--store", "memory://"]).exit_code == 2
    assert run(limitgate, ["budget", "gpt-5"], env={"LIMITGATE_STORE": None}).exit_code == 2
    assert run(limitgate, ["budget", "--store", f"unix://{tmp_path}/none"]).exit_code == 3

"""Limits as dependencies of FastAPI: what they take, and what they give."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, assert_type
from uuid import UUID

from fastapi import APIRouter, Depends, FastAPI, Request, Security

from limitgate import Decision, Limit, RateLimited
from limitgate.fastapi import RateLimit, Refused


class User:
    """Somebody."""

    id: UUID


async def current_user(token: str) -> User | None:
    """A coroutine function."""
    return None if token else User()


async def session() -> AsyncIterator[int]:
    """A generator."""
    yield 1


CurrentUser = Annotated[User | None, Depends(current_user)]

per_user = RateLimit("10/minute burst 3", Limit("100/hour"), name="user", key=["path", current_user, session, User])
RateLimit(qps=5, qpm=100, qph=1000, qpd=2000, key=[CurrentUser, Depends(session), Security(current_user, scopes=["me"])])
RateLimit("1/minute", methods=("POST",), cost=lambda request: len(request.path), on_error="closed", shadow=True)
RateLimit("1/minute", charge_if={"status": [401, "5xx"]})

app = FastAPI(dependencies=[Depends(per_user)])
router = APIRouter(dependencies=[Depends(per_user)])


@router.get("/items")
async def items(user: CurrentUser, decision: Annotated[Decision | None, Depends(per_user)]) -> list[int]:
    """A route."""
    assert_type(user, User | None)
    assert_type(decision, Decision | None)
    return []


async def by_hand(request: Request, error: Refused) -> None:
    """A limit that is asked as a function, and what it raises."""
    assert_type(await RateLimit("1/minute")(request), Decision | None)
    assert_type(error.decision, Decision)
    assert_type(error.status_code, int)
    same: RateLimited = error
    raise same


RateLimit(5)  # type: ignore[arg-type]
RateLimit("5/minute", key=5)  # type: ignore[arg-type]
RateLimit("5/minute", key=[5])  # type: ignore[list-item]
RateLimit("5/minute", per="message")  # type: ignore[call-arg]
RateLimit("5/minute", qpx=5)  # type: ignore[call-arg]
RateLimit("5/minute", on_error="sometimes")  # type: ignore[arg-type]
RateLimit("5/minute", charge_if=401)  # type: ignore[arg-type]

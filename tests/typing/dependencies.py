"""Limits as dependencies of FastAPI."""

from __future__ import annotations

from typing import Annotated, assert_type

from fastapi import APIRouter, Depends, FastAPI

from limitgate import Decision
from limitgate.fastapi import RateLimit


async def current_user() -> str:
    """Who asks."""
    return "ann"


CurrentUser = Annotated[str, Depends(current_user)]

RateLimit("10/minute", key=[Depends(current_user), "path"])
RateLimit("10/minute", key=[CurrentUser])
app = FastAPI(dependencies=[Depends(RateLimit("1000/minute"))])
router = APIRouter(
    dependencies=[Depends(RateLimit("10/minute", "100/day", name="user", key=[current_user, "ip"], shadow=True))]
)
by_user = RateLimit(qps=5, key=[current_user], cost=2, on_error="closed", charge_if={"status": [401]}, methods=["GET"])


@router.get("/hello", dependencies=[Depends(by_user)])
async def hello(user: Annotated[str, Depends(current_user)], decision: Annotated[Decision | None, Depends(by_user)]) -> str:
    """A route that is limited twice."""
    assert_type(decision, Decision | None)
    return f"{user}: {decision.remaining if decision else 'unlimited'}"


RateLimit(5)  # type: ignore[arg-type]
RateLimit("10/minute", qpx=5)  # type: ignore[call-arg]
RateLimit("10/minute", key=[5])  # type: ignore[list-item]
RateLimit("10/minute", on_error="sometimes")  # type: ignore[arg-type]
RateLimit("10/minute", charge_if=401)  # type: ignore[arg-type]

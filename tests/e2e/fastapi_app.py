"""A FastAPI application for tests/e2e: ``uvicorn tests.e2e.fastapi_app:app``. The store comes from ``LIMITGATE_STORE``."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Request, WebSocket
from fastapi.responses import JSONResponse
from fastapi.sse import EventSourceResponse

from limitgate import LimitGate, Rule
from limitgate.fastapi import RateLimit

go_on = asyncio.Event()


async def user(x_user: Annotated[str, Header()]) -> str:
    return x_user


twice = RateLimit("2/day", key=[user])
router = APIRouter(prefix="/v1", dependencies=[Depends(twice)])
app = FastAPI()


@router.get("/hello")
async def hello() -> dict[str, str]:
    return {"message": "hello"}


@router.websocket("/chat")
async def chat(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_text("hello")
    await socket.close()


@app.get("/events", response_class=EventSourceResponse, dependencies=[Depends(RateLimit("1/day", key=[user]))])
async def events() -> AsyncIterator[str]:
    yield "one"
    await go_on.wait()
    yield "two"


@app.get("/go-on")
async def release() -> None:
    go_on.set()


@app.exception_handler(HTTPException)
async def mine(request: Request, error: HTTPException) -> JSONResponse:
    return JSONResponse({"mine": error.detail}, error.status_code)


app.include_router(router, prefix="/api")
app.add_middleware(LimitGate, rules=[Rule("rule", "50/day", key=["header:x-user"])])

"""SGLang's surface on a real server (uvicorn, FastAPI): one engine for each role given, which keeps what reached it.

The first line printed is a JSON list of ports. Bodies are read in every way that an engine could read them: as a model, as JSON whatever
the type says, and as a form.
"""

import asyncio
import json
import socket
import sys

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict


FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")


class Chat(BaseModel):
    model_config = ConfigDict(extra="allow")


async def record(app, request, body, parsed=None):
    seen = {
        "path": request.scope["path"],
        "query": dict(request.query_params),
        "headers": dict(request.headers),
        "parsed": parsed,
        "json": None,
        "form": {},
    }
    try:
        seen["json"] = json.loads(body)
    except ValueError:
        pass
    # Only the endpoints for audio would read the second kind as a form.
    content_type = request.headers.get("content-type", "")
    if content_type.startswith(FORMS[0]) or (content_type.startswith(FORMS[1]) and "/audio/" in seen["path"]):
        async with request.form() as form:
            for name, value in form.multi_items():
                if not isinstance(value, str):
                    value = (await value.read()).decode("latin-1")
                try:
                    value = json.loads(value)
                except ValueError:
                    pass
                seen["form"].setdefault(name, []).append(value)
    app.state.seen.append(seen)
    return {"id": "a", "choices": [], "text": ""}


def engine(role, port):
    app = FastAPI(strict_content_type=False)
    app.state.seen = []

    @app.get("/v1/models")
    def models():
        return {"object": "list", "data": [{"id": "m", "object": "model"}]}

    @app.get("/server_info")
    def server_info():
        info = {"model_path": "m", "served_model_name": "m", "version": "0.5.23", "dp_size": 1, "page_size": 32}
        return info | {"disaggregation_mode": role, "disaggregation_bootstrap_port": port}

    @app.get("/route")
    def route():
        return {"dp_size": 1, "page_size": 32}

    @app.get("/seen")
    def seen():
        return app.state.seen

    @app.post("/v1/chat/completions")
    async def chat(body: Chat, request: Request):
        return await record(app, request, await request.body(), body.model_dump())

    @app.exception_handler(RequestValidationError)
    async def refused(request, error):
        # It has arrived all the same. FastAPI has read the body, perhaps as text.
        body = error.body if isinstance(error.body, (str, bytes)) else json.dumps(error.body)
        await record(app, request, body)
        return JSONResponse({"error": {"message": "no chat", "type": "x", "code": 400}}, 400)

    @app.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE", "PATCH"])
    async def other(request: Request):
        # The gateway's own probes and aborts are not what is looked for.
        if "x-case" not in request.headers:
            return {}
        return await record(app, request, await request.body())

    return app


async def main(roles):
    servers, ports = [], []
    for role in roles:
        listener = socket.create_server(("127.0.0.1", 0))
        ports.append(listener.getsockname()[1])
        config = uvicorn.Config(engine(role, ports[-1]), log_level="error", access_log=False)
        servers.append(uvicorn.Server(config).serve(sockets=[listener]))
    print(json.dumps(ports), flush=True)
    await asyncio.gather(*servers)


asyncio.run(main(sys.argv[1:]))

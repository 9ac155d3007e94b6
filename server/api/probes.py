"""What tells of the daemon itself, from its first second on: probes, version, metrics."""

import platform

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from moed.config.versions import installed_version
from moed.server.api.state import AppState
from moed.server.metrics import CONTENT_TYPE

READINESS_PATHS = ("/readyz", "/ready", "/health", "/ping")
PROBE_PATHS = frozenset({"/livez", "/startupz", *READINESS_PATHS})
ALWAYS_ANSWERED = PROBE_PATHS | {
    *("/version", "/metrics", "/openapi.json", "/server_info", "/v1/loads", "/v1/abort"),
    *("/admin/drain", "/admin/resume"),
}


def probes_router(state: AppState) -> APIRouter:
    router = APIRouter(tags=["probes"])

    def report(is_good: bool) -> Response:
        body = msgspec.json.encode(state.health.report())
        headers = {"Cache-Control": "no-cache"}
        if not is_good:
            headers["Retry-After"] = "1"
        return Response(body, 200 if is_good else 503, headers, "application/json")

    async def live(request: Request) -> Response:
        """200 as long as this process answers."""
        return report(True)

    async def started(request: Request) -> Response:
        """200 once every rank has done a real step, 503 before."""
        return report(state.health.has_started)

    async def ready(request: Request) -> Response:
        """200 while requests are served; 503 while starting, draining, or without a rank."""
        return report(state.health.is_ready)

    answers = {"/livez": live, "/startupz": started, **dict.fromkeys(READINESS_PATHS, ready)}
    for path, answer in answers.items():
        named = path not in READINESS_PATHS[1:]
        router.add_api_route(path, answer, methods=["GET"], include_in_schema=named)

    @router.get("/version")
    async def version(request: Request) -> Response:
        """Versions of the daemon and of what it stands on."""
        packages = ("torch", "tokenizers", "safetensors", "deep_ep", "fastapi", "pyzmq")
        versions = {package: installed_version(package) for package in packages}
        body = {"version": state.version, "python": platform.python_version(), **versions}
        return Response(msgspec.json.encode(body), media_type="application/json")

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Prometheus text format."""
        return Response(state.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    return router

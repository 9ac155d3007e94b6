"""The whole HTTP application, made from explicit state."""

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from moed.config.cors import CorsConfig
from moed.server.api.aborting import abort_router
from moed.server.api.administration import administration_router
from moed.server.api.cache import cache_router
from moed.server.api.chat import chat_router
from moed.server.api.completions import completions_router
from moed.server.api.errors import install_error_handlers
from moed.server.api.experts import experts_router
from moed.server.api.loads import loads_router
from moed.server.api.messages_api.routes import messages_router
from moed.server.api.middleware.api_keys import ApiKeys
from moed.server.api.middleware.availability import Availability
from moed.server.api.middleware.body_limit import BodyLimit
from moed.server.api.middleware.head_requests import HeadRequests
from moed.server.api.middleware.http_metrics import CountAnswers
from moed.server.api.middleware.request_id import RequestId
from moed.server.api.middleware.unexpected_errors import UnexpectedErrors
from moed.server.api.models import models_router
from moed.server.api.openapi import install_openapi
from moed.server.api.probes import probes_router
from moed.server.api.rendering import render_router
from moed.server.api.responses_api.routes import responses_router
from moed.server.api.state import AppState
from moed.server.api.tokenization import tokenization_router

# Beyond those that browsers show every page.
EXPOSED_HEADERS = (
    "x-request-id",
    "x-moed-ignored-params",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
)


def create_app(state: AppState) -> FastAPI:
    """All routes, behind the middleware that they share (the first is outermost)."""
    server = state.config.server
    app = FastAPI(
        title="moed",
        version=state.version,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        strict_content_type=False,
        # moed's own spans and metrics tell of requests; these would cost and count them again.
        telemetry={"tracing": False, "metrics": False, "logs": False},
        middleware=[
            Middleware(CountAnswers, metrics=state.metrics.http),
            Middleware(RequestId),
            *cors_middleware(server.cors),
            Middleware(UnexpectedErrors),
            Middleware(ApiKeys, keys=server.api_keys, admin_keys=server.admin_api_keys),
            Middleware(Availability, state=state),
            Middleware(BodyLimit, max_bytes=server.max_request_bytes),
            Middleware(HeadRequests),
        ],
    )
    install_error_handlers(app)
    for router in (
        probes_router(state),
        models_router(state),
        completions_router(state),
        chat_router(state),
        messages_router(state),
        responses_router(state),
        tokenization_router(state),
        experts_router(state),
        cache_router(state),
        render_router(state),
        abort_router(state),
        loads_router(state),
        administration_router(state),
    ):
        app.include_router(router)
    install_openapi(app)
    return app


def cors_middleware(cors: CorsConfig | None) -> list[Middleware]:
    """Outside of the guard: browsers ask first, without any key, what they may send."""
    if cors is None:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=cors.allowed_origins,
            allow_credentials=cors.allow_credentials,
            allow_methods=cors.allowed_methods,
            allow_headers=cors.allowed_headers,
            expose_headers=EXPOSED_HEADERS,
        )
    ]

"""The REST interface of a node: its FastAPI app."""

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from server.exporter import Exporter
from server.rest import blocks, cluster, events, namespaces
from server.rest import node as node_routes
from server.rest.door import Door, Sessions
from server.rest.openapi import DESCRIPTION, complete, limit_block_bytes
from server.rest.problems import install

if TYPE_CHECKING:
    from server.node import Node

API_VERSION = "1.0.0"


class RestApp(FastAPI):
    """FastAPI with a document that says all of what can come back."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = complete(super().openapi())
            if self.state.node is not None:
                limit_block_bytes(document, self.state.node.config.tiers.dram.slab)
            self.openapi_schema = document
        return self.openapi_schema


def create_app(node: "Node | None") -> FastAPI:
    """The app of a node; without one it only has its document."""
    app = RestApp(
        title="Cairn",
        version=API_VERSION,
        description=DESCRIPTION,
        routes=[
            *blocks.router.routes,
            *namespaces.router.routes,
            *node_routes.router.routes,
            *events.router.routes,
            *cluster.router.routes,
        ],
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.node = node
    install(app, node)
    if node is not None:
        sessions = Sessions(node)
        app.state.exporter = Exporter(node, sessions.__len__)
        app.add_middleware(Door, node=node, sessions=sessions)
    return app

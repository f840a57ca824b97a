"""A gateway as a whole: its parts, started and stopped in order inside the event loop that runs it."""

import asyncio
import logging

from server.gateway.app import create_app
from server.gateway.asking import Asking
from server.gateway.engines import Engines
from server.gateway.exchange import Parts
from server.gateway.metrics import Metrics
from server.gateway.settings import GatewayConfig
from server.gateway.sglang import Pairs
from server.gateway.tokens import Tokens, local_tokenizer
from server.gateway.upstream import Upstream
from server.http_serving import HttpServing

log = logging.getLogger("cairn.gateway")


class Gateway:
    """Serves from `start` to `stop`. `failure` gets what ends it by itself."""

    def __init__(self, config: GatewayConfig) -> None:
        """Raises ConfigError for a tokenizer that cannot be loaded, or an extra that is not installed."""
        settings = config.gateway
        loop = asyncio.get_running_loop()
        self._settings = settings
        local = local_tokenizer(settings.tokenizer) if settings.tokenizer else None
        self._upstream = Upstream(connect_s=settings.connect_timeout)
        self._asking = Asking(self._upstream, settings, loop.time)
        self._tokens = Tokens(self._upstream, settings, self._asking, local)
        engines = Engines(self._upstream, settings, loop.time)
        self._pairs = Pairs(engines)
        metrics = Metrics(self._asking, self._tokens)
        parts = Parts(settings, self._asking, self._tokens, engines, self._pairs, metrics, loop.time)
        app, self._front = create_app(config, parts)
        self._serving = HttpServing(app, "gateway.listen", settings.listen, self._crashed)
        self.failure: asyncio.Future[None] = loop.create_future()

    @property
    def url(self) -> str:
        """Where it serves, once it has started."""
        return self._serving.url

    async def start(self) -> None:
        """Raises ConfigError when it cannot listen there. A Conductor that is not there yet is waited for meanwhile."""
        await self._asking.start()
        await self._serving.start()

    async def stop(self) -> None:
        """Refuse what comes, let what is under way end for `drain_seconds`, then cut it off."""
        await self._front.drained(self._settings.drain_seconds)
        await self._serving.stop()
        await self._pairs.close()
        await self._asking.stop()
        self._tokens.close()
        await self._upstream.close()

    def _crashed(self, error: BaseException) -> None:
        if not self.failure.done():
            log.critical("the HTTP server ended", exc_info=error)
            self.failure.set_exception(error)

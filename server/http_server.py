"""uvicorn as our processes run it: they alone know of signals, and have little to wake up for."""

import asyncio
import contextlib
from collections.abc import Generator

import uvicorn

DATE_RENEWAL_S = 1.0


class HttpServer(uvicorn.Server):
    """uvicorn, without its own idea of signals, and with a call when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopped = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def main_loop(self) -> None:
        """Renew the Date header once a second; uvicorn's own loop looks for the end ten times."""
        while not self.should_exit:
            # Every call with a multiple of ten renews it.
            await self.on_tick(0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), DATE_RENEWAL_S)

    def stop(self) -> None:
        """Leave, with what connections are still open after `CLOSE_S` cut off."""
        self.should_exit = True
        self._stopped.set()

    async def wait_started(self) -> None:
        while not self.started:
            await asyncio.sleep(0.005)

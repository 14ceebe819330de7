"""An insider that answers every call as late as it may: at 0.8 of the shortest deadline."""

import asyncio
from contextlib import aclosing

from fedspd.cli.main import main
from fedspd.node.peer.liveness import Timeouts
from fedspd.node.wire.base import BaseTransport, FrameStream, RpcMethod

serve_promptly = BaseTransport.serve


async def serve(self: BaseTransport, sender: str, method: RpcMethod, data: bytes) -> FrameStream:
    """Yield the frames of an honest answer, late."""
    if method == "Fetch":
        await asyncio.sleep(0.8 * Timeouts().min_deadline)
    async with aclosing(serve_promptly(self, sender, method, data)) as frames:
        async for frame in frames:
            yield frame


if __name__ == "__main__":
    BaseTransport.serve = serve  # type: ignore[method-assign]
    main()

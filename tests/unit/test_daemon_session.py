"""What a daemon says while no controller takes it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import structlog
from structlog.testing import capture_logs

from elasticep.config import TlsConfig
from elasticep.proto import controller_pb2
from elasticep.runtime.limits import Limits
from elasticep.runtime.session import Session

NOBODY = "127.0.0.1:1"  # a port that only root may listen on, and nobody does


def test_controllers_that_cannot_be_reached_are_told_of_once() -> None:
    node: Any = SimpleNamespace(
        limits=Limits(unreachable_s=0.2),
        config=SimpleNamespace(tls=TlsConfig()),
        log=structlog.get_logger(),
        metrics=SimpleNamespace(connected=SimpleNamespace(set=lambda _: None)),
    )
    orders: Any = SimpleNamespace(hello=controller_pb2.NodeHello)

    async def scenario() -> list[dict[str, Any]]:
        session = Session(node, [NOBODY], orders)
        tries = 0

        def tried_after_it_was_told() -> bool:
            nonlocal tries
            tries += any(e["event"] == "controller.unreachable" for e in logs)
            return tries > 3

        session.start()
        try:
            assert await session.changed.until(tried_after_it_was_told, 30)
        finally:
            await session.close()
        return [dict(e) for e in logs if e["event"] == "controller.unreachable"]

    with capture_logs() as logs:
        (told,) = asyncio.run(scenario())
    assert told["log_level"] == "warning"
    assert "Connection refused" in told["why"][NOBODY]

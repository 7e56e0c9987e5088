"""Streams that are destroyed while they have something to run, and used afterwards."""

import threading
from typing import Any

from elasticep.errors import UsageError
from elasticep.testing import emulated_cuda


def ended() -> Any:
    """Whether a wait for the device was over before what a destroyed stream had ran; and what a
    call that names that stream says.
    """
    go, ran = threading.Event(), threading.Event()

    def held() -> None:
        go.wait(60)
        ran.set()

    callback = emulated_cuda.CALL(held)
    api = emulated_cuda.api()
    stream = emulated_cuda.Stream()
    handle = stream.cuda_stream
    api.epe_call(callback, handle)
    stream.close()
    early: list[bool] = []

    def wait() -> None:
        emulated_cuda.synchronize()
        early.append(not ran.is_set())

    waiter = threading.Thread(target=wait)
    waiter.start()
    waiter.join(0.2)  # one that does not wait for it is over at once
    statuses = [
        api.epe_stream_synchronize(handle),
        api.epe_stream_destroy(handle),
        api.epe_capture_begin(handle),
    ]
    said = ""
    try:
        api.epe_pause(1, handle)
    except UsageError as error:
        said = str(error)
    go.set()
    waiter.join()
    return early, statuses, said


def fed() -> bool:
    """Whether a wait for a stream is over when what was on it has run, though it gets more."""
    api = emulated_cuda.api()
    stream = emulated_cuda.Stream()
    over = threading.Event()

    def again() -> None:
        if not over.is_set():
            api.epe_call(callback, stream.cuda_stream)

    callback = emulated_cuda.CALL(again)
    for _ in range(2):  # one is always there when the other is done
        api.epe_call(callback, stream.cuda_stream)
    waiter = threading.Thread(target=stream.synchronize, daemon=True)
    waiter.start()
    waiter.join(60)
    waited = not waiter.is_alive()
    over.set()
    return waited

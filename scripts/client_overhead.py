"""What a dispatch and a combine cost in Python: CPU time of one thread, one rank, `inline` launch.

Prints the pair as eager calls, as the torch operators that a compiled graph has, and as the C
functions alone with arguments made before. Rounds of all three take turns, and the least of each
counts, so other work on the machine disturbs little.
"""

import argparse
import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from elasticep.client.exchange import Exchange
from elasticep.client.handle import NativeHandle
from elasticep.client.session import Session
from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig, Launch
from elasticep.native import abi
from elasticep.native.convert import geometry_struct
from elasticep.spec import ExchangeSpec
from elasticep.testing.clients import attach_to
from elasticep.testing.local_group import LocalGroup, spread

EXPERTS, TOPK, HIDDEN, CAP = 32, 8, 1024, 64
ROUNDS, CALLS = 30, 400
Calls = dict[str, Callable[[], object]]


@contextmanager
def one_rank(preset: str) -> Iterator[Session]:
    """A group of one rank whose view is staged."""
    config = GroupConfig(
        name="overhead",
        geometry=GroupGeometry(
            layers=1,
            experts=EXPERTS,
            topk=TOPK,
            hidden=HIDDEN,
            slots_per_rank=EXPERTS,
            max_ranks=1,
        ),
        exchanges=(("pair", ExchangeSpec.preset(preset, max_tokens=CAP)),),
        initial_ranks=1,
        spare_copies=0,
        launch=Launch.INLINE,
    )
    geometry = geometry_struct(config)
    with LocalGroup(geometry) as group:
        session = attach_to(group, config, 0)
        group.stage(1, 0, [0], spread(geometry, [0]))
        yield session
        session.detach()


def ways(session: Session, tokens: int) -> Calls:
    """The pair in each way."""
    exchange, handle = session.exchange("pair"), session._handle
    assert isinstance(exchange, Exchange)
    assert isinstance(handle, NativeHandle)
    x, ids = torch.randn(tokens, HIDDEN).bfloat16(), torch.rand(tokens, EXPERTS).topk(TOPK)[1]
    weights, out = torch.rand(tokens, TOPK), torch.empty(tokens, HIDDEN, dtype=torch.bfloat16)

    def eager() -> None:
        exchange.combine(0, exchange.dispatch(0, x, ids, weights), out)

    with session.step(tokens):
        fixed = exchange.dispatch(0, x, ids, weights)
        fixed.out.zero_()
        exchange.combine(0, fixed, out)
    arrays = (fixed.rows, fixed.scales, fixed.ids, fixed.weights, fixed.counts)
    more = (fixed.offsets, fixed.places, fixed.row_slots, exchange._lost[0, 0])
    given, key = (x, ids, weights, None), exchange._key
    ops = torch.ops.elasticep

    def operators() -> None:
        ops.exchange_dispatch(*arrays, *more, *given, key, 0, 0)
        ops.exchange_combine(out, fixed.rows, fixed.out, key, 0, 0)

    struct, lost = abi.Received(), np.zeros(tokens, np.uint8)
    api, native = handle._api, handle._session
    rows = abi.Rows(x.data_ptr(), None, abi.Dtype.BF16.value, 1.0)
    sent = (ctypes.byref(rows), ids.data_ptr(), 8, weights.data_ptr(), tokens)
    got = (ctypes.byref(struct), lost.ctypes.data)

    def core() -> None:
        api.ep_dispatch_send_rows(native, 0, 0, 0, *sent)
        api.ep_dispatch_recv(native, 0, 0, *got)
        api.ep_combine(native, 0, 0, out.data_ptr(), abi.Dtype.BF16.value)

    return {"eager calls": eager, "operators": operators, "C functions": core}


def least_us(session: Session, tokens: int, calls: Calls) -> dict[str, float]:
    """Microseconds of a pair in each way."""
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            with session.step(tokens):
                call()
                begin = time.thread_time_ns()
                for _ in range(CALLS):
                    call()
                least[name] = min(least[name], (time.thread_time_ns() - begin) / CALLS / 1000)
    return least


def main() -> None:
    """Print a line for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="ROUTED")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, CAP])
    options = parser.parse_args()
    torch.set_num_threads(1)
    with one_rank(options.preset) as session:
        for tokens in options.tokens:
            least = least_us(session, tokens, ways(session, tokens))
            print(f"{tokens} tokens:", ", ".join(f"{n} {us:.1f} us" for n, us in least.items()))


if __name__ == "__main__":
    main()

"""The worker process of one rank: `python -m elasticep.runtime.worker --socket PATH LABEL`.

It imports ctypes and the native core, nothing else, so that it is up in a moment: everything it
does happens in `ep_worker_run`, without Python. The daemon that starts it gives it a ticket in
`ELASTICEP_TICKET`.
"""

import os
import sys

from elasticep.native.abi import Error, api, error_text

_USAGE = (
    "usage: python -m elasticep.runtime.worker --socket PATH GROUP/RANK (started by the daemon)"
)


def run(arguments: list[str]) -> int:
    """Serve a rank until told to quit or fenced; the exit status.

    0: told to quit. 3: fenced. 1: anything else, with a line on stderr. 2: wrong arguments.
    """
    ticket = os.environ.pop("ELASTICEP_TICKET", "")
    if len(arguments) != 3 or arguments[0] != "--socket" or not ticket:
        sys.stderr.write(f"{_USAGE}\n")
        return 2
    _, path, label = arguments
    status = int(api().ep_worker_run(path.encode(), ticket.encode()))
    if status == 0:
        return 0
    sys.stderr.write(f"worker {label}: {error_text(status)}\n")
    return 3 if status == Error.EFENCED else 1


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))

"""When a client may try again to connect: at once after a first failure, then less and less often."""

import time

from kvstore.errors import ConnectFailed, Rejected, TransportError

REPLY_BYTES = 16 << 20  # of a reply's body; a node sends no larger ones
BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)  # after so many failures in a row


class Retry:
    """Keeps a node that is down from costing every call a connect."""

    def __init__(self) -> None:
        self._failures = 0
        self._at = 0.0

    def check(self, address: object) -> None:
        """Raises ConnectFailed when it is too early."""
        if time.monotonic() < self._at:
            raise ConnectFailed(f"{address}: did not answer a moment ago")

    def failed(self, error: BaseException) -> None:
        """Errors that another try may mend count; others (a wrong token) are told each time."""
        if isinstance(error, TransportError | Rejected):
            self._at = time.monotonic() + BACKOFF_S[min(self._failures, len(BACKOFF_S) - 1)]
            self._failures += 1

    def succeeded(self) -> None:
        self._failures = 0

"""Everything this store can refuse to do.

StoreError
├── NotFound             no readable replica of the block
├── TierFull             no slot is free, and nothing may be evicted
├── QuotaExceeded        the tenant's bytes are used up, and nothing of its own may be evicted
├── StaleLease           the lease or grant lapsed, was released, or is another client's
├── Corrupt              the bytes do not have the checksum they were written with
├── Rejected             a named limit was reached; retry_after_s says when to ask again
├── Forbidden            the token is missing or wrong, or does not allow this
├── NamespaceMismatch    the name stands for another namespace; the message lists the fields that differ
├── InvalidRequest       the request is well formed and makes no sense (sizes, counts, ranges)
├── ConfigError          a setting is unknown or bad; the message names the place
├── ProtocolError        the peer sent what the protocol does not allow
└── TransportError       the peer could not be reached, or was lost midway
    ├── ConnectFailed    nobody answered at that address
    ├── PeerLost         the connection broke; what it held is released
    └── DeadlineExceeded no answer in time

A miss is a result, not an error. A broken invariant is an AssertionError, and ends the process.
"""

from typing import ClassVar


class StoreError(Exception):
    """The root of all errors that a caller may meet in normal operation."""

    code: ClassVar[str] = "store_error"
    retryable: ClassVar[bool] = False


class NotFound(StoreError):
    code = "not_found"


class TierFull(StoreError):
    code = "tier_full"
    retryable = True


class QuotaExceeded(StoreError):
    code = "quota_exceeded"


class StaleLease(StoreError):
    code = "stale_lease"


class Corrupt(StoreError):
    code = "corrupt"


class Rejected(StoreError):
    code = "rejected"
    retryable = True

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Forbidden(StoreError):
    code = "forbidden"


class NamespaceMismatch(StoreError):
    code = "namespace_mismatch"


class InvalidRequest(StoreError):
    code = "invalid_request"


class ConfigError(StoreError):
    code = "config_error"


class ProtocolError(StoreError):
    code = "protocol_error"


class TransportError(StoreError):
    code = "transport_error"
    retryable = True


class ConnectFailed(TransportError):
    code = "connect_failed"


class PeerLost(TransportError):
    code = "peer_lost"


class DeadlineExceeded(TransportError):
    code = "deadline_exceeded"


def _tree(root: type[StoreError]) -> dict[str, type[StoreError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


ERRORS = _tree(StoreError)
"""Code on the wire -> class."""

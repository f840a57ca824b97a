"""What every message of the control protocol begins with."""

import msgspec


class Message(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Replies carry the request's id."""

    id: int

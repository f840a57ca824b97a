"""A byte stream both ways over the SENDs and receives of one queue pair, with credits so that no receive is missing.

A message lies in a slot: header | payload. What was read gives its slot back, and the peer a credit:

    u32 bytes of payload | u32 credits for messages of the other direction | payload

A sender has at most as many messages out as it has credits, so the peer's NIC never has to say that it is not ready.
Data leaves the last credit alone: by that one both ends can always give credits, whatever their readers do.
"""

import struct
from collections import deque
from typing import Final

from kvstore.errors import PeerLost, ProtocolError
from kvstore.region import view_of
from kvstore.transport.rdma.verbs import (
    STATUSES,
    SUCCESS,
    Completion,
    QueueLimits,
    QueuePair,
    Receive,
    Send,
    VerbsError,
)

MESSAGES: Final = 16  # each way
MESSAGE_BYTES: Final = 8 << 10
CHANNEL_BYTES: Final = 2 * MESSAGES * MESSAGE_BYTES  # received into, then sent from
CHANNEL_LIMITS: Final = QueueLimits(sends=MESSAGES, receives=MESSAGES, inline_bytes=96)
OWED: Final = MESSAGES // 2  # credits that are worth a message of their own
HEADER: Final = struct.Struct("<II")
POLLED: Final = 2 * MESSAGES


class Channel:
    """One end. It has `CHANNEL_BYTES` of memory at `address`, registered as `lkey`, which stay mapped until `close`.

    `pair` is new and in INIT: its receives are posted here, and its owner connects it, and closes it after `close`.
    Work request ids are (how many were posted before << 8 | slot << 1 | is it a receive): none comes twice.

    `error` says why nothing comes and goes any more, PeerLost or ProtocolError: the queue pair is in RESET then, and
    what came before can still be read. VerbsError when receives cannot be posted.
    """

    def __init__(self, pair: QueuePair, address: int, lkey: int) -> None:
        self.error: PeerLost | ProtocolError | None = None
        self.late_completions = 0
        self.pending_bytes = 0
        self.fd = pair.fd
        self._pair = pair
        self._address = address
        self._lkey = lkey
        self._memory = view_of(address, CHANNEL_BYTES)
        self._posts = 0
        self._receiving: deque[int] = deque()  # ids, in order; no slot is in more than one of these two and the inbox
        self._sending: deque[int] = deque()
        self._inbox: deque[tuple[int, int, int]] = deque()  # slot, [start, end) in the memory of what was not read
        self._queue: deque[memoryview] = deque()
        self._send_slot = 0
        self._credits = MESSAGES
        self._owed = 0
        for slot in range(MESSAGES):
            self._post_receive(slot)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Queue it, without a copy: it must stay as it is until `pending_bytes` is 0. Lost where there is an error."""
        if data and self.error is None:
            self._queue.append(memoryview(data).cast("B"))
            self.pending_bytes += len(self._queue[-1])

    def flush(self) -> None:
        """Send what may be sent now."""
        if self.error is not None:
            return
        try:
            while self._queue and self._credits > 1 and len(self._sending) < MESSAGES:
                self._send(self._fill())
            if self._owed >= OWED and self._credits and len(self._sending) < MESSAGES:
                self._send(0)
        except VerbsError as error:
            self._end(PeerLost(f"the channel broke: {error}"))

    def progress(self) -> None:
        """Take up what has completed, and send what may be sent now. Then `fd` is readable once something more has.

        Bounded: of what the peer may send without being read, and what it may give credits for.
        """
        if self.error is not None:
            return
        failed: PeerLost | None = None
        try:
            self._pair.arm()
            while completions := self._pair.poll(POLLED):
                for completion in completions:
                    lost = self._completed(completion)
                    failed = failed or lost  # the first says why, the others that they were flushed
        except VerbsError as error:
            failed = PeerLost(f"the channel broke: {error}")
        except ProtocolError as error:
            self._end(error)
            return
        if failed is not None:
            self._end(failed)
        self.flush()

    def read_into(self, target: memoryview) -> int:
        """As much of what came as fits; bytes read, 0 for none."""
        filled = 0
        while self._inbox and filled < len(target):
            slot, start, end = self._inbox[0]
            size = min(end - start, len(target) - filled)
            target[filled : filled + size] = self._memory[start : start + size]
            filled += size
            if start + size < end:
                self._inbox[0] = slot, start + size, end
                continue
            self._inbox.popleft()
            self._give_back_read(slot)
        if self._owed >= OWED:
            self.flush()
        return filled

    @property
    def is_readable(self) -> bool:
        return bool(self._inbox)

    @property
    def is_sent(self) -> bool:
        """All that was written is in the peer's memory. Never again once there is an error."""
        return self.error is None and not self._queue and not self._sending

    def close(self) -> None:
        """What is unread or unsent is gone, and the memory quiet, or the pair's own close makes it so. Idempotent."""
        if self.error is None:
            self._end(PeerLost("the channel is closed"))
        self._inbox.clear()

    def _end(self, error: PeerLost | ProtocolError) -> None:
        self.error = error
        self._queue.clear()
        self.pending_bytes = 0
        try:
            self._pair.reset()
        except VerbsError:  # the device is gone, or in no state to; nothing more is posted or looked at
            pass

    # What completed.

    def _completed(self, completion: Completion) -> PeerLost | None:
        wr_id, status, _, size = completion
        is_receive, slot = wr_id & 1, wr_id >> 1 & 127
        posted = self._receiving if is_receive else self._sending
        if not posted or posted[0] != wr_id:
            self.late_completions += 1
            return None
        posted.popleft()
        if status != SUCCESS:
            name = STATUSES[status] if 0 <= status < len(STATUSES) else f"status {status}"
            return PeerLost(f"the channel broke: {name}")
        if is_receive:
            self._received(slot, size)
        return None

    def _received(self, slot: int, size: int) -> None:
        start = slot * MESSAGE_BYTES
        payload_bytes, credits_ = HEADER.unpack_from(self._memory, start)
        if size != HEADER.size + payload_bytes:
            raise ProtocolError(f"a message of {size} bytes that says it has a payload of {payload_bytes}")
        if credits_ > MESSAGES - self._credits or not (credits_ or payload_bytes):
            raise ProtocolError(f"{credits_} credits where {MESSAGES - self._credits} messages have none")
        self._credits += credits_
        if payload_bytes:
            self._inbox.append((slot, start + HEADER.size, start + size))
        else:
            self._give_back(slot)

    # What is posted.

    def _give_back_read(self, slot: int) -> None:
        if self.error is None:
            try:
                self._give_back(slot)
            except VerbsError as error:
                self._end(PeerLost(f"the channel broke: {error}"))

    def _give_back(self, slot: int) -> None:
        self._post_receive(slot)
        self._owed += 1

    def _post_receive(self, slot: int) -> None:
        wr_id = self._posts << 8 | slot << 1 | 1
        self._pair.post_receive(Receive(wr_id, self._address + slot * MESSAGE_BYTES, self._lkey, MESSAGE_BYTES))
        self._posts += 1
        self._receiving.append(wr_id)

    def _fill(self) -> int:
        """Payload of what is queued into the next slot; its bytes."""
        first = (MESSAGES + self._send_slot) * MESSAGE_BYTES + HEADER.size
        filled, room = 0, MESSAGE_BYTES - HEADER.size
        while self._queue and filled < room:
            piece = self._queue[0]
            size = min(len(piece), room - filled)
            self._memory[first + filled : first + filled + size] = piece[:size]
            filled += size
            if size < len(piece):
                self._queue[0] = piece[size:]
            else:
                self._queue.popleft()
        self.pending_bytes -= filled
        return filled

    def _send(self, payload_bytes: int) -> None:
        """The next slot, with all credits that are owed."""
        slot, start = self._send_slot, (MESSAGES + self._send_slot) * MESSAGE_BYTES
        HEADER.pack_into(self._memory, start, payload_bytes, self._owed)
        size, wr_id = HEADER.size + payload_bytes, self._posts << 8 | slot << 1
        inline = size <= self._pair.inline_bytes
        self._posts += 1
        self._pair.post_send(Send(wr_id, self._address + start, self._lkey, size, signaled=True, inline=inline))
        self._sending.append(wr_id)
        self._send_slot = (slot + 1) % MESSAGES
        self._credits -= 1
        self._owed = 0

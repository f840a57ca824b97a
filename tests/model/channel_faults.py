"""Faults seeded into the channel. Tests that let one live are too weak."""

from tests.model.faults import Fault

FILE = "transport/rdma/channel.py"
MODEL_FAULTS = [
    Fault("data takes the last credit", FILE, "self._credits > 1 and", "self._credits > 0 and"),
    Fault("nobody counts what it sends", FILE, "        self._credits -= 1\n", ""),
    Fault(
        "what was given is still owed",
        FILE,
        "        self._credits -= 1\n        self._owed = 0\n",
        "        self._credits -= 1\n",
    ),
    Fault("credits never go alone", FILE, "if self._owed >= OWED and self._credits and", "if False and"),
    Fault(
        "credits go alone only with nothing owed", FILE, "self._owed >= OWED and self._credits", "self._owed > MESSAGES"
    ),
    Fault("a slot is written while it is sent from", FILE, "(slot + 1) % MESSAGES", "slot"),
    Fault("a message of credits alone keeps its slot", FILE, "        else:\n            self._give_back(slot)\n", ""),
    Fault(
        "a slot is received into before it was read",
        FILE,
        "if start + size < end:",
        "if start + size < end and not self._give_back_read(slot):",
    ),
    Fault(
        "what did not fit is forgotten",
        FILE,
        "                self._inbox[0] = slot, start + size, end\n",
        "                self._inbox.popleft()\n",
    ),
    Fault(
        "the rest of a piece is not sent",
        FILE,
        "                self._queue[0] = piece[size:]\n",
        "                self._queue.popleft()\n",
    ),
    Fault("pieces that are sent are still pending", FILE, "        self.pending_bytes -= filled\n", ""),
    Fault(
        "progress does not send",
        FILE,
        "            self._end(failed)\n        self.flush()\n",
        "            self._end(failed)\n",
    ),
    Fault("a failed queue pair is not reset", FILE, "            self._pair.reset()\n", "            pass\n"),
    Fault(
        "what was queued stays after an error",
        FILE,
        "        self._queue.clear()\n        self.pending_bytes = 0\n",
        "",
    ),
]
FAULTS = [
    Fault(
        "credits go without a slot to be sent from",
        FILE,
        "OWED and self._credits and len(self._sending) < MESSAGES:",
        "OWED and self._credits:",
    ),
    Fault(
        "data goes without a slot to be sent from",
        FILE,
        "self._credits > 1 and len(self._sending) < MESSAGES",
        "self._credits > 1",
    ),
    Fault("credits over what was sent are taken", FILE, "credits_ > MESSAGES - self._credits or not", "not"),
    Fault("a message of nothing is taken", FILE, " or not (credits_ or payload_bytes)", ""),
    Fault("a header's size is believed", FILE, "if size != HEADER.size + payload_bytes:", "if size < HEADER.size:"),
    Fault("a failed completion counts as a message", FILE, "if status != SUCCESS:", "if status == -1:"),
    Fault("late completions are believed", FILE, "if not posted or posted[0] != wr_id:", "if not posted:"),
    Fault("of several reasons the last counts", FILE, "failed = failed or lost", "failed = lost or failed"),
    Fault("after close what came can be read", FILE, "        self._inbox.clear()\n", ""),
    Fault("everything goes inline", FILE, "inline = size <= self._pair.inline_bytes", "inline = True"),
    Fault("nothing goes inline", FILE, "inline = size <= self._pair.inline_bytes", "inline = False"),
    Fault(
        "data over TCP after the move is ignored",
        "transport/rdma/channel_stream.py",
        "        self._spoke()\n",
        "        pass\n",
    ),
    Fault(
        "what came before the TCP connection ended is dropped",
        "transport/rdma/channel_stream.py",
        "        self._progress()\n        self._end(error)\n",
        "        self._end(error)\n",
    ),
    Fault(
        "a connection is lost twice",
        "transport/rdma/channel_stream.py",
        "        if self._is_ended:\n            return\n        self._is_ended = self._is_closing = True\n",
        "        self._is_ended = self._is_closing = True\n",
    ),
    Fault(
        "closing does not wait for what is unsent",
        "transport/rdma/channel_stream.py",
        "self._is_closing and self._channel.is_sent",
        "self._is_closing",
    ),
    Fault(
        "the TCP connection outlives the channel",
        "transport/rdma/channel_stream.py",
        "        self._lifeline.abort()\n",
        "",
    ),
    Fault(
        "half a message that timed out is completed later",
        "transport/rdma/channel_socket.py",
        "            self._channel.close()\n            raise\n",
        "            raise\n",
    ),
    Fault(
        "a hang-up is told before what came",
        "transport/rdma/channel_socket.py",
        "while not self._channel.is_readable:",
        "while self._is_hung_up or not self._channel.is_readable:",
    ),
    Fault(
        "it polls without sleeping",
        "transport/rdma/channel_socket.py",
        "math.ceil(left_s * 1000)",
        "0",
    ),
    Fault(
        "a connection moves in the middle of a frame",
        "transport/stream.py",
        "if self._frame is not None or self._targets or (self._filled and not self._is_parsing) or self.is_draining:",
        "if self.is_draining:",
    ),
]

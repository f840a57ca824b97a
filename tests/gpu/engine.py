"""An engine's process in the tests: it maps a slab and works in one slot, late, on a stream of its own.

    python -m tests.gpu.engine ROLE SLAB OFFSET SIZE [EVENT]

The role "write" fills the slot with WRITTEN, "read" only reads it. It first waits for EVENT, and then for a while.
It prints the handle of an event after its work, and whether that is done yet; told to go on, what it saw.
"""

import sys

import torch

from kvstore.tiers.hbm import import_slab

WRITTEN = 0x77
LATE_CYCLES = 2_000_000_000  # a second, or two


def main(role: str, slab: str, offset: str, size: str, event: str = "") -> None:
    mapped = import_slab(bytes.fromhex(slab))
    slot = mapped[int(offset) : int(offset) + int(size)]
    torch.zeros(64, dtype=torch.uint8, device=slot.device).fill_(1).clone()  # loads the kernels
    torch.cuda.synchronize()
    stream, done = torch.cuda.Stream(slot.device), torch.cuda.Event(interprocess=True)
    seen = torch.zeros(int(size), dtype=torch.uint8, device=slot.device)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        if event:
            stream.wait_event(torch.cuda.Event.from_ipc_handle(slot.device, bytes.fromhex(event)))
        else:
            torch.cuda._sleep(LATE_CYCLES)
        if role == "write":
            slot.fill_(WRITTEN)
        seen.copy_(slot)
        done.record(stream)
    print(bytes(done.ipc_handle()).hex(), "done" if done.query() else "late", flush=True)
    sys.stdin.readline()
    stream.synchronize()
    print(*sorted(set(seen.tolist())), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

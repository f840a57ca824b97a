"""`cairn put`: files become blocks, by key or as the blocks of a prompt."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from engine_client.blocking import BlockingClient
from engine_client.steps import OpenSpace, PutReport
from kvstore.errors import InvalidRequest
from kvstore.types import BlockKey
from server.commands import inputs, output
from server.commands.reach import FAILED, invocation, node

BATCH_BYTES, BATCH_BLOCKS = 64 << 20, 1024  # put at once: memory here, and bytes in flight there


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, start + size) of a file, or bytes that are here already."""

    key: BlockKey
    source: Path | bytes
    start: int
    size_bytes: int

    def read(self) -> bytes:
        if isinstance(self.source, bytes):
            return self.source[self.start : self.start + self.size_bytes]
        return inputs.read_piece(self.source, self.start, self.size_bytes)


def put(
    context: typer.Context,
    namespace: Annotated[str, typer.Argument(help="Its name; see `cairn namespace define`.")],
    files: Annotated[list[Path], typer.Argument(help="Files with the blocks' bytes; - is stdin.", metavar="FILE...")],
    *,
    key: Annotated[
        list[str] | None, typer.Option("--key", "-k", metavar="HEX", help="The key of each file, in their order.")
    ] = None,
    tokens: Annotated[str, typer.Option(metavar="FILE", help="Token ids of the prompt; - is stdin.")] = "",
    prompt_ids: Annotated[str, typer.Option(metavar="IDS", help="Token ids of the prompt: 1,2,3.")] = "",
    part: Annotated[
        int, typer.Option(min=0, max=65_534, help="Which part of each block, where blocks have several.")
    ] = 0,
) -> None:
    """Store files as blocks.

    With --key each file is one block, with the key given for it. With the
    prompt's tokens the files are the blocks of a chain, from the first: as
    many files as blocks, or one file that is cut into blocks. What the node
    has already is not stored again. Fails (1) if a block found no room or is
    being written by somebody else.

    \b
    Examples:
      cairn put llama block.kv --key 00112233445566778899aabbccddeeff
      cairn put llama prompt.kv --tokens prompt.ids
      cairn put llama block0.kv block1.kv --tokens prompt.ids
    """
    given = inputs.keys(key or [])
    inputs.just_one({"--key": given, "--tokens": tokens, "--prompt-ids": prompt_ids})
    if given and len(given) != len(files):
        raise InvalidRequest(f"{len(given)} keys for {output.count_text(len(files), 'file')}")
    ids = [] if given else inputs.tokens(tokens, prompt_ids)
    with node(context, moves_blocks=True) as client:
        space = client.find(namespace, inputs.part_of(given, part))
        chained = not given
        pieces = list(_pieces(inputs.chain(space, given, ids), files, space.namespace.block_bytes if chained else None))
        reports = _put(client, space, pieces, chained=chained)
        reason = ""
        if (first := reports.first_refused) is not None:
            reason = str(client.explain(space, [first])[0]["reason"])
    _print(context, namespace, pieces, reports, reason)


@dataclass(slots=True)
class _Reports:
    """What became of all blocks."""

    stored: int = 0
    present: int = 0
    busy: int = 0
    refused: int = 0
    over_quota: int = 0
    stored_bytes: int = 0
    first_refused: BlockKey | None = None

    def add(self, report: PutReport) -> None:
        self.stored += report.stored
        self.present += report.present
        self.busy += report.busy
        self.refused += report.refused
        self.over_quota += report.over_quota
        self.stored_bytes += report.stored_bytes


def _pieces(keys: list[BlockKey], files: list[Path], block_bytes: int | None) -> Iterator[Piece]:
    """Of one file per key; or of one file, cut into blocks of `block_bytes`, or of equal sizes if that is 0."""
    sources = [inputs.read_stdin() if str(path) == inputs.STDIN else path for path in files]
    sizes = [len(source) if isinstance(source, bytes) else inputs.file_bytes(source) for source in sources]
    if block_bytes is not None and len(files) == 1:
        yield from _cut(keys, sources[0], sizes[0], block_bytes)
    elif len(files) != len(keys):
        raise InvalidRequest(f"{len(files)} files for the {output.count_text(len(keys), 'block')} of the prompt")
    else:
        for key, source, size in zip(keys, sources, sizes, strict=True):
            yield Piece(key, source, 0, size)


def _cut(keys: list[BlockKey], source: Path | bytes, size_bytes: int, block_bytes: int) -> Iterator[Piece]:
    piece_bytes = block_bytes or size_bytes // len(keys)
    if piece_bytes * len(keys) != size_bytes:
        wanted = f"{block_bytes} bytes" if block_bytes else "equal size"
        raise InvalidRequest(f"{size_bytes} bytes are not {output.count_text(len(keys), 'block')} of {wanted}")
    for position, key in enumerate(keys):  # [start, start + piece_bytes) is one block
        yield Piece(key, source, position * piece_bytes, piece_bytes)


def _put(client: BlockingClient, space: OpenSpace, pieces: list[Piece], *, chained: bool) -> _Reports:
    """Put runs of a chain one after the other, or each block by itself. Nothing is put after a refused run."""
    reports = _Reports()
    done, parent = 0, None
    with output.progress() as shown:
        task = shown.add_task("storing blocks", total=len(pieces))
        while done < len(pieces):
            batch = _batch(pieces[done : done + BATCH_BLOCKS]) if chained else pieces[done : done + 1]
            keys = [piece.key for piece in batch]
            report = client.put(space, keys, [piece.read() for piece in batch], parent)
            reports.add(report)
            done += len(batch)
            shown.update(task, completed=done)
            if report.refused:
                reports.refused += len(pieces) - done
                reports.over_quota += len(pieces) - done if report.over_quota else 0
                reports.first_refused = keys[len(keys) - report.refused]
                break
            parent = keys[-1] if chained else None
    return reports


def _batch(pieces: list[Piece]) -> list[Piece]:
    """The first of them that are put at once, at least one."""
    size_bytes = 0
    for count, piece in enumerate(pieces):
        size_bytes += piece.size_bytes
        if count and size_bytes > BATCH_BYTES:
            return pieces[:count]
    return pieces


def _print(context: typer.Context, namespace: str, pieces: list[Piece], reports: _Reports, reason: str) -> None:
    if invocation(context).json:
        output.emit(
            {
                "namespace": namespace,
                "blocks": len(pieces),
                "stored": reports.stored,
                "present": reports.present,
                "busy": reports.busy,
                "refused": reports.refused,
                "over_quota": reports.over_quota,
                "stored_bytes": reports.stored_bytes,
                "reason": reason,
                "keys": [piece.key.hex() for piece in pieces],
            }
        )
    else:
        stored = output.count_text(reports.stored, "block")
        output.say(f"stored {stored}, {output.size_text(reports.stored_bytes)}")
        for count, what in (
            (reports.present, "were there already"),
            (reports.busy, "are being written by somebody else"),
            (reports.refused, reason),
        ):
            if count:
                output.say(f"{output.count_text(count, 'block')}: {what}")
    if reports.refused or reports.busy:
        raise typer.Exit(FAILED)

"""`cairn check`: does what the node, the cluster, or an NVMe tier without its node says of itself agree?"""

from pathlib import Path
from typing import Annotated

import typer

from kvstore.errors import InvalidRequest
from kvstore.fsck import Fsck
from server.commands import output
from server.commands.reach import FAILED, invocation, node

PATIENCE_S = 60.0  # it reads every block's record
SHOWN = 1000  # sentences

DataDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Check the NVMe tier in this folder (tiers.nvme.path), whose node does not run."),
]
Deep = Annotated[bool, typer.Option("--deep", help="With --data-dir: read each block and compare its checksum.")]
Repair = Annotated[bool, typer.Option("--repair", help="With --data-dir: mend what can be mended.")]


Cluster = Annotated[bool, typer.Option("--cluster", help="All nodes of the cluster, and whether they agree.")]


def check(
    context: typer.Context,
    *,
    cluster: Cluster = False,
    data_dir: DataDir = None,
    deep: Deep = False,
    repair: Repair = False,
) -> None:
    """Check the live node: table, slabs and holds must agree. Or an NVMe tier.

    Fails (1) if they do not, with --repair only if something is left. The
    live check needs an admin, and a node answers nobody else meanwhile. With
    --cluster all nodes look, and must agree on who is a member and has what.

    \b
    Examples:
      cairn check && echo all is well
      cairn check --cluster
      cairn check --data-dir /var/lib/cairn --deep
      cairn check --data-dir /var/lib/cairn --repair
    """
    if cluster and data_dir is not None:
        raise InvalidRequest("--cluster asks nodes that run: not with --data-dir")
    if data_dir is not None:
        _check_folder(context, data_dir, deep=deep, repair=repair)
        return
    if deep or repair:
        raise InvalidRequest("--deep and --repair go with --data-dir")
    with node(context, PATIENCE_S) as client, output.progress() as shown:
        shown.add_task("checking", total=None)
        names = [row["name"] for row in client.nodes().rows] if cluster else []
        problems = client.check(cluster=cluster)
    if invocation(context).json:
        output.emit({"ok": not problems, "problems": problems} | ({"nodes": names} if cluster else {}))
    else:
        where = f" on {output.count_text(len(names), 'node')}" if cluster else ""
        output.say(*problems or [f"all is well{where}"])
    if problems:
        raise typer.Exit(FAILED)


def _check_folder(context: typer.Context, folder: Path, *, deep: bool, repair: bool) -> None:
    fsck, problems, more = _looked(folder, deep=deep, repair=repair)
    left: list[str] = []
    if repair:
        _, left, _ = _looked(folder, deep=deep, repair=False)
    is_ok = not (left if repair else problems)
    counts = fsck.counts
    if invocation(context).json:
        output.emit(
            {
                "ok": is_ok,
                "problems": problems,
                "left": left,
                "counts": {
                    "slabs": counts.slabs,
                    "records": counts.records,
                    "good": counts.good,
                    "mended": counts.mended,
                    "problems": dict(counts.problems),
                },
            }
        )
    else:
        output.say(*problems, *([f"and {more} more"] if more else []))
        slabs, blocks = output.count_text(counts.slabs, "slab"), output.count_text(counts.records, "record")
        output.say(f"{slabs}, {blocks}, {counts.good:,} good, {counts.mended:,} mended")
        output.say(*([f"left: {problem}" for problem in left] or (["all is well"] if is_ok else [])))
    if not is_ok:
        raise typer.Exit(FAILED)


def _looked(folder: Path, *, deep: bool, repair: bool) -> tuple[Fsck, list[str], int]:
    """(The check, its first sentences, how many more there were)."""
    fsck = Fsck(folder, deep=deep, repair=repair)
    problems: list[str] = []
    more = 0
    with output.progress() as shown:
        task = shown.add_task("slabs", total=None)
        for problem in fsck.run(lambda done, total: shown.update(task, completed=done, total=total)):
            if len(problems) < SHOWN:
                problems.append(problem)
            else:
                more += 1
    return fsck, problems, more

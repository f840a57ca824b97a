"""Runs a simulated cluster under seeds: `python -m tests.sim.run --seeds 200 --start 0`, or `--nodes 1000`.

A seed decides about everything: what clients ask, what goes wrong when, how long each message takes.
"""

import argparse
import asyncio
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path
from random import Random
from time import monotonic

from kvstore.errors import StoreError
from tests.sim import checkers, many
from tests.sim.clients import ROOT, WITHIN_S, Client, Prompts
from tests.sim.loop import Crashed, Process, SimulatedLoop, run
from tests.sim.node import LEAST_NODES, World
from tests.sim.toxics import TOXICS

STEP_SEEDS = 8  # that a process takes up at once
TROUBLED_S = 8.0  # of virtual time in which clients ask and things go wrong
SETTLE_S = 24.0  # then, until nothing is on its way: leases have run out
READ_BACK_S = 5.0
TOLD_S = 0.5  # until the directory knows what a reading moved
MOST_TOXICS = 6
WITH_DISKS = 0.25  # of all runs
MEMORY = "/dev/shm"
WRONGS_SHOWN = 12


@dataclass(slots=True)
class Outcome:
    """Of one run. `digest` is the same whenever the run was the same."""

    seed: int
    wrongs: list[str] = field(default_factory=list)
    toxics: list[str] = field(default_factory=list)
    digest: str = ""
    hits: int = 0
    misses: int = 0
    failures: int = 0
    messages: int = 0
    seconds: float = 0.0


def simulate(seed: int) -> Outcome:
    """A cluster of 2 to 5 nodes in trouble, then at rest."""
    outcome = Outcome(seed)
    begun = monotonic()
    try:
        with tempfile.TemporaryDirectory(dir=MEMORY if Path(MEMORY).is_dir() else None) as folder:
            run(lambda loop: _simulate(loop, seed, Path(folder), outcome))
    except Crashed as error:
        outcome.wrongs.append(str(error))
    except Exception as error:  # a checker that fails is a failure of this seed, not of all
        outcome.wrongs.append("".join(traceback.format_exception(error)))
    outcome.seconds = monotonic() - begun
    return outcome


async def _simulate(loop: SimulatedLoop, seed: int, folder: Path, outcome: Outcome) -> None:
    random = Random(seed)
    has_disks = random.random() < WITH_DISKS
    world = World(
        *(loop, seed),
        nodes=random.randint(LEAST_NODES, 3 if has_disks else 5),
        slabs=random.choice((4, 8, 16)),
        folder=folder if has_disks else None,
    )
    digest = blake2b(digest_size=8)
    world.network.trace = lambda line: digest.update(line.encode())
    try:
        await _live(world, random, outcome)
    finally:
        world.close()
    outcome.digest, outcome.messages = digest.hexdigest(), world.network.messages


async def _live(world: World, random: Random, outcome: Outcome) -> None:
    """Trouble, rest, and reading back what there is."""
    await world.start()
    prompts = Prompts(random)
    clients = [
        Client(world, f"c{number}", node, prompts, outcome.wrongs)
        for number, node in enumerate(world.nodes.values())
        for _ in range(random.randint(1, 2))
    ]
    until = world.loop.seconds + TROUBLED_S
    living = [asyncio.ensure_future(client.live(until)) for client in clients]
    troubles = [
        asyncio.ensure_future(_trouble(world, random, outcome.toxics)) for _ in range(random.randint(0, MOST_TOXICS))
    ]
    await asyncio.gather(*troubles)
    await world.ready()
    await asyncio.gather(*living)
    await asyncio.sleep(SETTLE_S)
    outcome.wrongs += at_rest(world)
    if not outcome.wrongs:
        await _read_back(world, prompts, outcome.wrongs)
    for client in clients:
        outcome.hits += client.hits
        outcome.misses += client.misses
        outcome.failures += client.failures


async def _trouble(world: World, random: Random, begun: list[str]) -> None:
    await asyncio.sleep(random.uniform(0.0, TROUBLED_S))
    name = random.choice(list(TOXICS))
    begun.append(name)
    await TOXICS[name](world, random)


def at_rest(world: World) -> list[str]:
    """What is wrong by now."""
    wrongs = [f"{node.name}: {wrong}" for node in world.nodes.values() for wrong in checkers.node_at_rest(node)]
    if not hasattr(next(iter(world.nodes.values())), "cluster"):
        return wrongs
    wrongs += checkers.same_views(world)
    wrongs += checkers.directory_is_exact(world, checkers.union_of_holders(world))
    return wrongs


async def _read_back(world: World, prompts: Prompts, wrongs: list[str]) -> None:
    """Every block that somebody has can be had from every node."""
    process = Process(world.loop, "reader")
    random = Random(world.random.random())
    for node in world.nodes.values():
        client = Client(world, "reader", node, prompts, wrongs)
        for prompt in random.sample(prompts.all(), min(3, len(prompts.all()))):
            await asyncio.sleep(TOLD_S)
            expected = checkers.reachable(node, ROOT, prompt)
            try:
                async with asyncio.timeout(WITHIN_S):
                    found = await process.spawn(client.read_once(process, prompt, READ_BACK_S))
            except (StoreError, TimeoutError) as error:
                wrongs.append(f"{node.name}: reading back: {error!r}")
                continue
            if found < min(
                expected, checkers.reachable(node, ROOT, prompt)
            ):  # what came may have been in others' place
                wrongs.append(f"{node.name} reads {found} blocks back of {expected} that there are")


def failures_of(seeds: Sequence[int], *, processes: int = 1, until: float = 0.0) -> Iterator[Outcome]:
    """Every outcome, in the order of the seeds; with `until` no more begin then."""
    if processes == 1:
        for seed in seeds:
            yield simulate(seed)
        return
    with ProcessPoolExecutor(
        processes, mp_context=get_context("spawn")
    ) as pool:  # a fork may inherit a lock that is held
        yield from pool.map(simulate, seeds, chunksize=STEP_SEEDS)


def told(outcome: Outcome) -> str:
    """What went wrong, and how to have it again."""
    lines = [f"seed {outcome.seed} ({', '.join(outcome.toxics) or 'no toxics'}):"]
    lines += [f"  {wrong}" for wrong in outcome.wrongs[:WRONGS_SHOWN]]
    if len(outcome.wrongs) > WRONGS_SHOWN:
        lines.append(f"  and {len(outcome.wrongs) - WRONGS_SHOWN} more")
    lines.append(f"  again: python -m tests.sim.run --seeds 1 --start {outcome.seed}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many")
    parser.add_argument("--start", type=int, default=0, help="the first")
    parser.add_argument("--minutes", type=float, default=0.0, help="go on for so long, whatever --seeds says")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=0, help="the directory with so many nodes, and fewer")
    parser.add_argument("--verbose", action="store_true", help="a line for each seed")
    options = parser.parse_args()
    if options.nodes:
        many.show(options.nodes)
        return 0
    begun = monotonic()
    failed = seeds = 0
    numbers = count(options.start)
    total = Outcome(-1)
    while not seeds or (options.minutes and monotonic() < begun + 60 * options.minutes):
        some = list(islice(numbers, options.seeds))
        for outcome in failures_of(some, processes=min(options.processes, len(some))):
            seeds += 1
            failed += bool(outcome.wrongs)
            total.hits += outcome.hits
            total.misses += outcome.misses
            total.failures += outcome.failures
            total.messages += outcome.messages
            if outcome.wrongs:
                print(told(outcome), flush=True)
            elif options.verbose:
                print(outcome, flush=True)
    print(
        f"{seeds} seeds from {options.start} in {monotonic() - begun:.0f} s, {failed} failed: {total.messages}"
        f" messages, {total.hits} blocks read, {total.misses} missed, {total.failures} requests refused or lost"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

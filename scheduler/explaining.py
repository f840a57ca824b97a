"""Decisions in the form in which they are told: as routes, and as a table of what each instance would have meant."""

from typing import Any, NamedTuple

import numpy as np

from scheduler.fleet import Member
from scheduler.outlook import Choice, Outlook
from scheduler.requests import Pull, Request, Route


class Draft(NamedTuple):
    """A decision that nothing was done about yet."""

    outlook: Outlook
    choice: Choice
    prefill: Member
    decode: Member
    tbt_s: float
    pull: Pull | None


def route_of(request: Request, draft: Draft) -> Route:
    """The draft as a route."""
    choice = draft.choice
    return Route(
        request=request.id,
        prefill=draft.prefill.instance.name,
        decode=draft.decode.instance.name,
        cached_tokens=choice.cached_tokens,
        pull=draft.pull,
        queue_s=choice.queue_s,
        transfer_s=choice.transfer_s,
        prefill_s=choice.prefill_s,
        ttft_s=choice.ttft_s,
        tbt_s=draft.tbt_s,
    )


def rows_of(draft: Draft, threshold: float) -> list[dict[str, Any]]:
    """What each prefill instance would have meant, best first."""
    outlook = draft.outlook
    pulls = outlook.pull_s(threshold)
    rows = []
    for at, name in enumerate(outlook.pool.names):
        local = outlook.local(at)
        row: dict[str, Any] = {
            "instance": name,
            "queue_s": local.queue_s,
            "local_tokens": local.cached_tokens,
            "local_ttft_s": local.ttft_s,
            "pull_from": None,
            "pull_tokens": 0,
            "pull_ttft_s": None,
            "is_chosen": at == draft.choice.position,
        }
        source = int(np.argmin(pulls[:, at])) if len(pulls) else -1
        if source >= 0 and np.isfinite(pulls[source, at]):
            pulled = outlook.pulling(at, source)
            row |= {
                "pull_from": outlook.sources[source].node,
                "pull_tokens": pulled.cached_tokens,
                "pull_ttft_s": pulled.ttft_s,
            }
        rows.append(row)
    rows.sort(key=lambda row: min(row["local_ttft_s"], row["pull_ttft_s"] or row["local_ttft_s"]))
    return rows

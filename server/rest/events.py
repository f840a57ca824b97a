"""What happened to blocks, over HTTP: a long poll of the node's event log."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request

from kvstore.wire_events import EVENTS_LIMIT, BlockEvent, Happened, Subscribe, events_of
from server.rest.door import session_of, visit_of
from server.rest.keys import find_namespace
from server.rest.models import MOST, Answer
from server.rest.openapi import GUARDED, by_name, problems
from server.session import Session

router = APIRouter(generate_unique_id_function=by_name)

MOST_WAIT_S = 20.0
ANSWER_S = 10.0  # on top of the wait

OfNamespace = Annotated[str, Query(alias="namespace", description="Of this namespace only; empty: of all.")]
Epoch = Annotated[int, Query(ge=0, le=MOST, description="`epoch` of the answer before; 0: none.")]
After = Annotated[int, Query(ge=0, le=MOST, description="`last` of the answer before.")]
Wait = Annotated[float, Query(ge=0, le=MOST_WAIT_S, description="Seconds to wait for something to tell.")]
Limit = Annotated[int, Query(ge=1, le=EVENTS_LIMIT)]


class EventRow(Answer):
    """A block (part) came to a tier, or went from it."""

    type: Literal["stored", "removed"]
    namespace: str
    tier: str
    key: str
    parent: str
    bytes: int


class EventList(Answer):
    """All that happened from `first` to `last`. Not exact: list the blocks, then ask after this answer's `last`."""

    epoch: int
    first: int
    last: int
    is_exact: bool
    events: list[EventRow]


@router.get("/v1/events", response_model=EventList, tags=["node"], responses=GUARDED | problems(404))
async def list_events(
    request: Request,
    namespace: OfNamespace = "",
    epoch: Epoch = 0,
    after: After = 0,
    wait_s: Wait = 0.0,
    limit: Limit = 1000,
) -> EventList:
    """What happened to this tenant's blocks since an earlier answer; without one, where to begin."""
    session = session_of(request)
    number = find_namespace(session, namespace).number if namespace else 0
    visit_of(request).allow(wait_s + ANSWER_S)
    found: Happened = await session.ask(Subscribe(0, number, epoch, after, int(wait_s * 1000), limit))
    rows = [_row(session, event) for event in events_of(found)]
    return EventList(epoch=found.epoch, first=found.first, last=found.last, is_exact=found.is_exact, events=rows)


def _row(session: Session, event: BlockEvent) -> EventRow:
    space = session.store.catalogue.numbered(session.tenant, event.namespace)
    return EventRow(
        type="stored" if event.is_stored else "removed",
        namespace=space.names[0] if space.names else "",
        tier=event.tier,
        key=event.key.hex(),
        parent=event.parent.hex() if event.parent is not None else "",
        bytes=event.size,
    )

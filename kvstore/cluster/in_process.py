"""Coordinators of members in one process, for tests, simulations and a node alone."""

import asyncio
from collections.abc import Callable
from typing import Any

from kvstore.cluster.members import DEAD_S, Member, View
from kvstore.errors import ConfigError, ConnectFailed


class Room:
    """Where members meet. `delay_s` says how long the next view takes to reach one of them, in seconds; one that
    overtakes another is the last that is heard."""

    def __init__(self, delay_s: Callable[[], float] = lambda: 0.0) -> None:
        self.delay_s = delay_s
        self._view = View()
        self._seats: dict[str, RoomCoordinator] = {}
        self._cut: set[str] = set()
        self._expiries: dict[str, asyncio.TimerHandle] = {}

    def coordinator(self) -> "RoomCoordinator":
        """One for a node that is to join; a start of a node, one coordinator."""
        return RoomCoordinator(self)

    def cut(self, name: str) -> None:
        """Put that node out of touch: it is not heard, hears nothing, and knows it. In `DEAD_S` it is gone."""
        self._cut.add(name)
        self._silent(name)

    def hang(self, name: str) -> None:
        """Stop that node, which does not know it: it is not heard and hears nothing until `heal`. Another start of it
        does not hang. In `DEAD_S` it is gone."""
        if seat := self._seats.get(name):
            seat.is_hung = True
            self._silent(name)

    def heal(self, name: str) -> None:
        """End `cut` and `hang`: that node says again what it last said of itself, and hears the newest view."""
        self._cut.discard(name)
        if seat := self._seats.get(name):
            seat.is_hung = False
            self._heard_from(name)
            self.put(seat.member)
            seat.tell(self._view)

    def reaches(self, name: str) -> bool:
        """Whether that node and this room hear each other."""
        seat = self._seats.get(name)
        return name not in self._cut and not (seat is not None and seat.is_hung)

    def enter(self, seat: "RoomCoordinator") -> View:
        """Take in a start of a node. Errors as of `Coordinator.join`."""
        name = seat.member.name
        if name in self._cut:
            raise ConnectFailed(f"{name} is out of touch with the room")
        holder = self._view.members.get(name)
        if holder is not None and holder.epoch >= seat.member.epoch:
            raise ConfigError(f"a living node has the name {name}, and the epoch {holder.epoch}")
        self._heard_from(name)
        self._seats[name] = seat
        self.put(seat.member)
        return self._view

    def leave(self, seat: "RoomCoordinator") -> None:
        """Forget a start of a node; one out of touch is gone when its silence has lasted."""
        name = seat.member.name
        if self._seats.get(name) is not seat:
            return
        reached = self.reaches(name)
        del self._seats[name]
        if reached:
            self.drop(name, seat.member.epoch)

    def put(self, member: Member) -> None:
        """Let all know what a member says of itself. A later start of it is not overwritten."""
        known = self._view.members.get(member.name)
        if known != member and not (known is not None and known.epoch > member.epoch):
            self._change({**self._view.members, member.name: member})

    def drop(self, name: str, epoch: int) -> None:
        """Let all know that this start of a node is none any more; if it is heard, it says that it is."""
        if not self._view.has(name, epoch):
            return
        self._change({other: member for other, member in self._view.members.items() if other != name})
        if (seat := self._seats.get(name)) is not None and seat.member.epoch == epoch:
            asyncio.get_running_loop().call_soon(self._object, seat)

    def _object(self, seat: "RoomCoordinator") -> None:
        name = seat.member.name
        if self._seats.get(name) is seat and self.reaches(name):
            self.put(seat.member)

    def _change(self, members: dict[str, Member]) -> None:
        self._view = View(self._view.revision + 1, dict(sorted(members.items())))
        for name, seat in self._seats.items():
            if self.reaches(name):
                seat.tell(self._view)

    def _silent(self, name: str) -> None:
        if name in self._view.members and name not in self._expiries:
            epoch = self._view.members[name].epoch
            self._expiries[name] = asyncio.get_running_loop().call_later(DEAD_S, self._expire, name, epoch)

    def _heard_from(self, name: str) -> None:
        if expiry := self._expiries.pop(name, None):
            expiry.cancel()

    def _expire(self, name: str, epoch: int) -> None:
        del self._expiries[name]
        self.drop(name, epoch)


class RoomCoordinator:
    """A member's side of a `Room`; a `Coordinator`."""

    def __init__(self, room: Room) -> None:
        self.is_hung = False
        self.member = Member(name="", epoch=0, address="")
        self._room = room
        self._changed: Callable[[View], Any] | None = None
        self._heard = -1

    @property
    def trouble(self) -> str:
        if self._changed is None or self.is_hung or self._room.reaches(self.member.name):
            return ""
        return "out of touch with the room"

    async def join(self, member: Member, changed: Callable[[View], Any]) -> None:
        assert self._changed is None, "a coordinator is for one start of a node"
        self.member, self._changed = member, changed
        try:
            view = self._room.enter(self)
        except (ConfigError, ConnectFailed):
            self._changed = None
            raise
        self._hear(view)

    async def update(self, member: Member) -> None:
        assert (member.name, member.epoch) == (self.member.name, self.member.epoch), "another node"
        self.member = member
        if self._changed is not None and self._room.reaches(member.name):
            self._room.put(member)

    async def report_dead(self, name: str, epoch: int) -> None:
        if self._changed is not None and self._room.reaches(self.member.name):
            self._room.drop(name, epoch)

    async def aclose(self) -> None:
        if self._changed is not None:
            self._changed = None
            self._room.leave(self)

    def tell(self, view: View) -> None:
        """Let this member hear of a view, once it has had its way through the network."""
        loop, delay_s = asyncio.get_running_loop(), self._room.delay_s()
        if delay_s > 0:
            loop.call_later(delay_s, self._hear, view)
        else:
            loop.call_soon(self._hear, view)

    def _hear(self, view: View) -> None:
        if self._changed is None or not self._room.reaches(self.member.name) or view.revision <= self._heard:
            return
        self._heard = view.revision
        self._changed(view)

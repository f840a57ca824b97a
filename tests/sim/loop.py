"""An asyncio loop whose clock jumps: when nothing is ready, time moves to the next timer at once.

No sockets, no threads: simulated networks and disks are timers. Each callback belongs to a `Process`, by the context
that it was scheduled in; one that is stopped runs nothing until it goes on, one that was killed nothing ever again.
With one seed for all randomness a run is the same every time, so a failure is its seed.
"""

import asyncio
import selectors
import traceback
import warnings
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from typing import Any

MOST_TURNS = 100_000  # of the loop in which no time passes: it is in a circle
BEGIN_S, MOST_S = 1000.0, 1000.0  # of virtual time, from its beginning to where something did not end


class Crashed(Exception):
    """Somebody's invariant is broken; nothing that comes after it means anything."""


class SimulatedFuture(asyncio.Future[Any]):
    """Its hash is a running number, so sets of futures are in the same order in each run."""

    def __init__(self, number: int, *, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.number = number

    def __hash__(self) -> int:
        return self.number


class SimulatedTask(asyncio.Task[Any]):
    """Hashed as SimulatedFuture."""

    def __init__(self, number: int, coro: Coroutine[Any, Any, Any], **how: Any) -> None:
        self.number = number
        super().__init__(coro, **how)

    def __hash__(self) -> int:
        return self.number


class Process:
    """What is stopped and killed together; `enter` is the context that its callbacks run in."""

    def __init__(self, loop: "SimulatedLoop", name: str) -> None:
        self.loop = loop
        self.name = name
        self.is_killed = False
        self.is_stopped = False
        self.context = copy_context()
        self.context.run(PROCESS.set, self)
        self.tasks: dict[SimulatedTask, None] = {}
        self._parked: list[_Gate] = []
        self._turns_left = -1
        self._after: Callable[[], None] = lambda: None

    def spawn(self, work: Coroutine[Any, Any, Any], name: str = "") -> "asyncio.Task[Any]":
        """Run `work` as part of this process."""
        return self.loop.create_task(work, name=name or None, context=self.context.copy())

    def call(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Do that soon, as part of this process."""
        self.loop.call_soon(work, *arguments, context=self.context)

    def after(self, turns: int, work: Callable[[], None]) -> None:
        """Do `work` before this process does anything once more, after so many callbacks of it."""
        self._turns_left, self._after = turns, work

    def stop(self) -> None:
        self.is_stopped = True

    def go_on(self) -> None:
        """What would have happened meanwhile happens now."""
        self.is_stopped = False
        parked, self._parked = self._parked, []
        for gate in parked:
            self.loop.call_parked(gate)

    def kill(self) -> None:
        self.is_killed = True
        self._turns_left = -1
        self._parked.clear()
        self.loop.buried += self.tasks

    def may_run(self, gate: "_Gate") -> bool:
        """Whether the callback may run now; if the process is stopped, it does later."""
        self._turns_left -= self._turns_left >= 0 and not self.is_stopped
        if self._turns_left == 0:
            self._turns_left = -1
            self._after()
        if self.is_stopped and not self.is_killed:
            self._parked.append(gate)
        return not (self.is_stopped or self.is_killed)


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


class _Gate:
    """A callback of a process, which asks first whether that runs."""

    __slots__ = ("arguments", "callback", "context", "handle", "process")

    def __init__(
        self, process: Process, callback: Callable[..., Any], arguments: tuple[Any, ...], context: Context
    ) -> None:
        self.process = process
        self.callback = callback
        self.arguments = arguments
        self.context = context
        self.handle: asyncio.Handle | None = None

    def __call__(self) -> None:
        if (self.handle is None or not self.handle.cancelled()) and self.process.may_run(self):
            self.callback(*self.arguments)


class _NoIo(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.loop: SimulatedLoop | None = None
        self._turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "deadlock: every task waits, and no timer is set"
        assert self.loop is not None
        self._turns = 0 if timeout > 0 else self._turns + 1
        if self.loop.crash:
            raise Crashed(self.loop.crash)
        assert self._turns < MOST_TURNS, "livelock: the loop turns, and no time passes"
        self.loop.seconds += max(0.0, timeout)
        assert self.loop.seconds < BEGIN_S + MOST_S, "it does not end"
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.seconds = BEGIN_S
        selector = _NoIo()
        super().__init__(selector)
        selector.loop = self
        self.numbers = 0
        self.buried: list[asyncio.Task[Any]] = []
        self.crash = ""  # what nobody caught: the run ends
        self.set_task_factory(_made_task)
        self.set_exception_handler(_note_error)

    def time(self) -> float:
        return self.seconds

    def now(self) -> float:
        """As a `kvstore.clock.Clock`."""
        return self.seconds

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def create_future(self) -> "asyncio.Future[Any]":
        return SimulatedFuture(self.number(), loop=self)

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:
        context = copy_context() if context is None else context
        process = context.get(PROCESS)
        if process is None:
            return super().call_soon(callback, *args, context=context)
        gate = _Gate(process, callback, args, context)
        gate.handle = super().call_soon(gate, context=context)
        return gate.handle

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any,
                context: Context | None = None) -> asyncio.TimerHandle:  # fmt: skip
        context = copy_context() if context is None else context
        process = context.get(PROCESS)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        gate = _Gate(process, callback, args, context)
        handle = gate.handle = super().call_at(when, gate, context=context)
        return handle

    def call_parked(self, gate: _Gate) -> None:
        """Do soon what a stopped process did not."""
        super().call_soon(gate, context=gate.context)

    def run_in_executor(self, *_: Any) -> Any:  # a thread would make the run differ from its replay
        raise AssertionError("simulated code may not use threads")

    def bury(self) -> None:
        """End what killed processes left behind, and what still waits."""
        waiting = sorted(asyncio.all_tasks(self), key=lambda task: task.number)
        for task in [*self.buried, *waiting]:
            task._log_destroy_pending = False
            with suppress(RuntimeError, AssertionError, ValueError), warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # some were never begun
                coro = task.get_coro()
                if isinstance(coro, Coroutine | Generator):
                    coro.close()


def _made_task(loop: asyncio.AbstractEventLoop, coro: Any, **how: Any) -> SimulatedTask:
    assert isinstance(loop, SimulatedLoop)
    task = SimulatedTask(loop.number(), coro, loop=loop, **how)
    context = how.get("context")
    process = PROCESS.get() if context is None else context.get(PROCESS)
    if process is not None:
        process.tasks[task] = None
        task.add_done_callback(lambda done: process.tasks.pop(done, None))
    return task


def _note_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    assert isinstance(loop, SimulatedLoop)
    error = context.get("exception")
    story = "".join(traceback.format_exception(error)) if isinstance(error, BaseException) else ""
    loop.crash = loop.crash or f"{context.get('message')}: {story}"


async def until(condition: Callable[[], bool], step_s: float) -> None:
    """Look again each `step_s`."""
    while True:
        if condition():
            return
        await asyncio.sleep(step_s)


def run(main: Callable[[SimulatedLoop], Coroutine[Any, Any, Any]]) -> Any:
    """The result of `main` in a loop of its own."""
    loop = SimulatedLoop()
    try:
        return loop.run_until_complete(main(loop))
    finally:
        loop.bury()
        loop.close()

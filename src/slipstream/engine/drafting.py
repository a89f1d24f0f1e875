"""Which drafters are asked: those that are loaded, within what is set at run time, without those taken out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from slipstream.core.errors import InputError
from slipstream.core.params import Speculating, SpeculationSetting
from slipstream.core.types import Row
from slipstream.drafters.base import Drafter
from slipstream.drafters.guard import Guard

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

HISTORY = 16
"""Settings of before that one can go back to."""


@dataclass(frozen=True, slots=True)
class RunSetting:
    """What is set at run time: speculation at all, and within it the drafters and nodes that any row may have."""

    speculation: bool = True
    limits: SpeculationSetting = field(default_factory=SpeculationSetting)


class Drafting:
    """The drafters of an engine and its settings, with those of before. Changes are for between steps.

    Whatever is changed, no row is dropped and no token differs: a drafter that is no longer asked lets go of its rows,
    one that is asked again takes rows up where they are.
    """

    def __init__(self, drafters: Sequence[Drafter], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.guards = tuple(Guard(drafter, vocab_size) for drafter in drafters)
        self.setting = RunSetting()
        self._history: deque[tuple[RunSetting, tuple[Guard, ...]]] = deque(maxlen=HISTORY)
        self._out: set[str] = set()
        self.active: tuple[Guard, ...] = self.guards
        """Those that are asked now."""

    @property
    def names(self) -> tuple[str, ...]:
        """All that are loaded."""
        return tuple(guard.name for guard in self.guards)

    @property
    def max_nodes(self) -> int | None:
        """Draft nodes any row may have; None for as many as the controller says."""
        return self.setting.limits.max_nodes

    def configure(self, **changes: Any) -> None:
        """Set speculation, drafters or max_nodes from the next step on. Raises InputError; nothing is changed then."""
        unknown = sorted(set(changes) - {"speculation", "drafters", "max_nodes"})
        if unknown:
            raise InputError(f"unknown setting {unknown[0]!r}; choose speculation, drafters or max_nodes")
        speculation = changes.pop("speculation", self.setting.speculation)
        if not isinstance(speculation, bool):
            raise InputError(f"speculation is {speculation!r}; it must be true or false")
        limits = replace(self.setting.limits, **changes)
        self.check(limits)
        self._enter(RunSetting(speculation, limits), self.guards)

    def exchange(self, drafter: Drafter) -> None:
        """A drafter takes the place of the loaded one of its name, such as a head that was trained anew."""
        self.check(SpeculationSetting(drafters=(drafter.name,)))
        new = Guard(drafter, self._vocab_size)
        self._enter(self.setting, tuple(new if guard.name == new.name else guard for guard in self.guards))

    def previous(self) -> None:
        """Back to what was set before the last change. Raises InputError when there was none."""
        if not self._history:
            raise InputError("there is no earlier setting to go back to")
        self._take(*self._history.pop())

    def _enter(self, setting: RunSetting, guards: tuple[Guard, ...]) -> None:
        self._history.append((self.setting, self.guards))
        self._take(setting, guards)

    def _take(self, setting: RunSetting, guards: tuple[Guard, ...]) -> None:
        """An exchanged drafter comes in with a clean record, whatever became of the one before."""
        self._out -= {guard.name for guard in guards if guard not in self.guards}
        self.setting, self.guards = setting, guards
        self._settle()

    def take_out(self, name: str) -> None:
        """Do not ask this drafter until it is put back, whatever is set."""
        self._out.add(name)
        self._settle()

    def put_back(self, name: str) -> None:
        """Ask this drafter again, where the settings allow it."""
        self._out.discard(name)
        self._settle()

    def _settle(self) -> None:
        allowed = self.setting.limits.drafters
        before, self.active = (
            self.active,
            tuple(
                guard
                for guard in self.guards
                if self.setting.speculation
                and guard.name not in self._out
                and (allowed is None or guard.name in allowed)
            ),
        )
        for guard in before:
            if guard not in self.active:
                guard.retire()

    def check(self, setting: SpeculationSetting) -> None:
        """Raise InputError for drafters that are not loaded."""
        for name in setting.drafters or ():
            if name not in self.names:
                loaded = ", ".join(self.names) or "none"
                raise InputError(f"drafter {name!r} is not loaded; loaded: {loaded}")

    def describe(self, row: Row, speculation: Speculating) -> None:
        """Write into a new row what its request says about speculation."""
        row.speculate = speculation is not False and bool(self.guards)
        if isinstance(speculation, SpeculationSetting):
            self.check(speculation)
            row.max_nodes = speculation.max_nodes
            row.drafters = None if speculation.drafters is None else frozenset(speculation.drafters)
            row.speculate &= speculation.max_nodes != 0 and row.drafters != frozenset()

    def features_wanted(self, row: Row) -> int | None:
        """The last tokens of a row's prompt whose features are of any use; None for all."""
        most = 0
        for guard in self._asked(row):
            if guard.reads_features:
                if guard.looks_back is None:
                    return None
                most = max(most, guard.looks_back)
        return most

    def prefilled(self, row: Row, start: int, features: NDArray[np.float32] | None) -> None:
        """A part of the row's prompt was read; features of its tokens from `start` on, as the target was asked."""
        if features is not None and len(features):
            for guard in self._asked(row):
                guard.prefilled(row, start, features)

    def begin(self, row: Row) -> None:
        """The row's prompt is read."""
        for guard in self._asked(row):
            guard.begin(row)

    def _asked(self, row: Row) -> list[Guard]:
        """The drafters that work for a row."""
        if not row.speculate:
            return []
        return [
            guard for guard in self.active if (row.drafters is None or guard.name in row.drafters) and guard.wants(row)
        ]

    def end(self, row: Row) -> int:
        """The row leaves; returns how often drafters failed for it."""
        failures = 0
        for guard in self.guards if row.speculate else ():
            failures += guard.failures(row)
            guard.end(row)
        return failures

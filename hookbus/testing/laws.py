"""The laws that every plugin has to keep to, and how each is tried.

``check_plugin`` in a plugin's own tests::

    from hookbus.testing import check_plugin

    def test_it_keeps_the_laws():
        report = check_plugin(
            lambda: EmaPlugin(torch.zeros(3)), change=lambda plugin: plugin.shadow.add_(1)
        )
        print(report)
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import attrs
import torch

from hookbus.checkpoint import Checkpoint, checkpoints
from hookbus.checkpoint.files import write_file
from hookbus.checkpoint.manifest import NAME, read_manifest
from hookbus.errors import CallError, HookbusError, LawError, StateError
from hookbus.ordering import list_unknown_words
from hookbus.registration import EVENTS, name_type
from hookbus.testing.pictures import Pictures, list_differences
from hookbus.testing.traces import Trace, list_changes
from hookbus.testing.trial import Bench, Fault, Source, Trial, bench, streams_kept
from hookbus.testing.verdict import LAWS, LawResult, Outcome, PluginReport

UNKNOWN = 10**6
"""A version that no plugin has reached."""


def check_plugin(
    make: Any,
    *,
    change: Callable[[Any], object] | None = None,
    other: Callable[..., Any] | None = None,
    name: str | None = None,
    may_change: Collection[str] = (),
    skip: Collection[str] = (),
) -> PluginReport:
    """Put a plugin through the laws that every plugin has to keep to; return what came of each.

    ``make`` makes what is checked, anew and equal each time: a plugin, or a component that an
    installed plugin looks after. If it takes an argument it is given the bus, on which it can
    first attach what the plugin needs beside it::

        def make(bus):
            model = torch.nn.Linear(2, 1)
            bus.attach(model=model)
            return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    ``make`` may also be a plugin or component itself, or the name of an installed plugin, such as
    ``"ema-hookbus:ema"``. Where there is only one, laws that need a second are not checked.

    ``change(made)`` brings what was made into another state, by the same each time; or ``other``
    makes one that is in another state. ``name`` is that of the section. ``may_change`` are shell
    patterns of attributes that a save may change, such as ``"plugin._cache"``; ``skip`` are keys
    of laws to leave out.

    Checkpoints are really written, into a folder that goes. Random streams of the process are put
    back at the end. No test framework is needed.

    Raises:
        LawError: laws are broken; each is named, with what was seen and what to change.
        CallError: an argument is not what is expected.
    """
    keys = [law.key for law in LAWS]
    may_change, skip = _take_words("may_change", may_change), _take_words("skip", skip)
    if unknown := [key for key in skip if key not in keys]:
        raise CallError(
            f"skip=({unknown[0]!r},): there is no such law; there are {', '.join(keys)}"
        )
    if change is not None and other is not None:
        raise CallError("change= and other= both make another state; pass one of them")
    source = Source(make, name)
    if other is not None and not source.is_function:
        raise CallError("other= needs a function as make; pass change= instead")
    with bench(source, change, other and Source(other, name)) as place:
        try:
            return _Court(place, may_change, skip).judge()
        finally:
            place.close()


def _take_words(argument: str, words: Collection[str]) -> tuple[str, ...]:
    if isinstance(words, str) or not all(isinstance(word, str) for word in words):
        raise CallError(f"{argument}={words!r}: pass a tuple of words")
    return tuple(words)


class _NotChecked(Exception):  # noqa: N818 - an answer, and not a failure
    """Why a law cannot be checked."""


@attrs.define(eq=False)
class _Court:
    """Puts one plugin through the laws.

    ``saved`` is what was saved in a checkpoint of ``run``, and ``later`` what would have been
    after one more change.
    """

    bench: Bench
    may_change: tuple[str, ...]
    skip: tuple[str, ...]
    results: dict[str, LawResult] = attrs.field(factory=dict)
    run: Path | None = None
    saved: Pictures = attrs.field(factory=dict)
    later: Pictures = attrs.field(factory=dict)

    def judge(self) -> PluginReport:
        first = self.bench.make()
        component = first.bus.components.get(first.name)
        who = f"{first.entry}, class {name_type(first.entry.plugin)}"
        if component is not None and component is not first.entry.plugin:
            who += f", for class {name_type(component)}"
        has_other = self.bench.change is not None or self.bench.other is not None
        if first.entry.has_section and not has_other:
            raise CallError(
                f"{first.entry} saves a state, so pass change=, a function that brings what was"
                " made into another state, or other=, one that makes another"
            )
        self.try_law("order", self.check_order, first)
        if not self.try_law("start", self.start, first):
            self.give_up("no run could be started")
        elif not first.entry.has_section:
            if has_other:
                self.note("something", "broken", "it has no save_state, so it has no section")
            self.give_up("it has no save_state")
        else:
            self.check_saving(first)
            if self.run is not None:
                self.check_restoring()
        report = PluginReport(who, tuple(self.results[law.key] for law in LAWS))
        if report.broken:
            raise LawError(report.explain(), report)
        return report

    # -- results -------------------------------------------------------------------------------

    def try_law(self, key: str, check: Callable[..., list[str] | None], *given: Any) -> bool:
        """Note what comes of one law, and whether it holds."""
        if key in self.skip:
            self.note(key, "left out")
            return True
        try:
            seen = check(*given) or []
        except Fault:
            raise
        except _NotChecked as error:
            self.note(key, "not checked", str(error))
            return True
        except Exception as error:
            seen = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
        self.note(key, "broken" if seen else "holds", *seen)
        return not seen

    def note(self, key: str, outcome: Outcome, *seen: str) -> None:
        law = next(law for law in LAWS if law.key == key)
        if self.results.get(key, LawResult(law, "holds")).outcome != "broken":
            self.results[key] = LawResult(law, outcome, seen)

    def give_up(self, why: str) -> None:
        """Note that what is left cannot be checked."""
        for law in LAWS:
            if law.key not in self.results:
                self.note(law.key, "not checked", why)

    # -- the laws ------------------------------------------------------------------------------

    def check_order(self, trial: Trial) -> list[str]:
        for event in EVENTS:
            trial.bus.order(event)
        entries = trial.bus.plugins
        return [
            f"it is to come before or after {word!r}, and no kind and no plugin is called so"
            for entry, word in list_unknown_words(entries)
            if entry is trial.entry
        ]

    def start(self, trial: Trial) -> None:
        trial.bus.resume(trial.run)

    def check_saving(self, trial: Trial) -> None:
        """Look at what is handed over, and commit it."""
        try:
            before = trial.take_picture()
            if self.bench.other is not None:
                trial = self.bench.make_changed()
            self.bench.bring_on(trial)
            with trial.saving() as save:
                streams, start = self.bench.read_streams(), trial.trace()
                self.saved = trial.collect(save)
                end, streams_after = trial.trace(), self.bench.read_streams()
            again = trial.take_picture()
        except StateError as error:
            self.note("storable", "broken", str(error))
            self.give_up("its state cannot be stored")
            return
        except Fault:
            raise
        except Exception as error:
            self.note("something", "broken", f"{type(error).__name__}: {error}")
            self.give_up("it cannot be saved")
            return
        self.try_law("something", self.find_nothing)
        self.try_law("repeatable", lambda: list_differences(self.saved, again))
        self.try_law("no draws", lambda: self.list_draws(streams, streams_after, start, end))
        self.try_law("no changes", lambda: self.list_attributes(start, end))
        self.try_law("differs", self.find_same, before)
        self.try_law("storable", self.check_stored, trial)
        if self.run is None:
            self.give_up("no checkpoint could be written")

    def find_nothing(self) -> list[str]:
        if not self.saved:
            return ["save_state wrote nothing"]
        if all(picture.is_empty for picture in self.saved.values()):
            return [f"save_state wrote {' and '.join(map(str, self.saved.values()))}"]
        return []

    def find_same(self, before: Pictures) -> list[str]:
        if list_differences(before, self.saved):
            return []
        how = "other= makes" if self.bench.other is not None else "change= leads to"
        return [f"what {how} is saved with the same bits as what make= makes"]

    def check_stored(self, trial: Trial) -> list[str]:
        """Write a checkpoint, and read it after one more change."""
        checkpoint = trial.commit()
        self.bench.bring_on(trial)
        self.later = trial.take_picture()
        read = trial.read(checkpoint)
        self.run = trial.run
        return list_differences(self.saved, read)

    def list_draws(
        self, before: dict[str, str], after: dict[str, str], start: Trace, end: Trace
    ) -> list[str]:
        process = [f"{name} was drawn from" for name in before if before[name] != after[name]]
        held = [path for path in start.streams if path in end.found]
        own = [f"{path} was drawn from" for path in held if list_changes(start, end, path)]
        return process + own

    def list_attributes(self, start: Trace, end: Trace) -> list[str]:
        return [
            text
            for text in list_changes(start, end)
            if not any(fnmatchcase(_cut(text), pattern) for pattern in self.may_change)
            and _cut(text) not in start.streams
        ]

    # -- restoring -----------------------------------------------------------------------------

    def check_restoring(self) -> None:
        assert self.run is not None
        if self.bench.is_single:
            for key in ("fresh", "meta", "memory"):
                self.note(key, "not checked", "pass a function that makes it")
            place = "in place"
        else:
            place = "fresh"
            self.try_law("in place", self.restore_over_another)
            self.try_law("memory", self.check_memory)
            self.try_law("meta", self.restore_from_meta)
        self.try_law("version", self.check_version)
        fresh = self.bench.make(run=self.run)
        if self.bench.is_single:
            self.bench.bring_on(fresh)
        self.try_law("check", self.check_checks, fresh)
        if not self.try_law(place, self.restore, fresh):
            self.give_up("it could not be restored")
            return
        self.try_law("twice", self.restore, fresh)
        self.try_law("goes on", self.check_going_on, fresh)

    def restore(self, trial: Trial, **options: Any) -> list[str]:
        """Resume, and compare."""
        trial.bus.resume(trial.run, **options)
        return self.compare(trial)

    def compare(self, trial: Trial) -> list[str]:
        found = list_differences(self.saved, trial.take_picture())
        return found and ["first is what was saved, second what it would save now", *found]

    def need_change(self) -> None:
        if self.bench.change is None:
            raise _NotChecked("pass change= instead of other=")

    def restore_over_another(self) -> list[str]:
        self.need_change()
        trial = self.bench.make_changed()
        self.bench.bring_on(trial)
        shutil.rmtree(trial.run)
        assert self.run is not None
        shutil.copytree(self.run, trial.run, ignore=shutil.ignore_patterns("run.lock"))
        return self.restore(trial)

    def check_checks(self, trial: Trial) -> list[str]:
        """Fire what only looks, and compare every attribute."""
        resume = trial.bus.prepare(trial.run)
        streams, start = self.bench.read_streams(), trial.trace()
        resume.advance("resume_start")
        seen = [
            text
            for text in list_changes(start, trial.trace())
            if text.startswith("component") or trial.bus.components.get(trial.name) is None
        ]
        resume.advance("on_setup")
        start = trial.trace()
        trial.ask("check_state", resume=resume)
        trial.ask("restore_before_configure_sharded", resume=resume)
        seen += list_changes(start, trial.trace())
        after = self.bench.read_streams()
        seen += [f"{name} was drawn from" for name in streams if streams[name] != after[name]]
        return list(dict.fromkeys(seen))

    def check_going_on(self, trial: Trial) -> list[str]:
        self.need_change()
        self.bench.bring_on(trial)
        found = list_differences(self.later, trial.take_picture())
        return found and ["first is the one that was saved, second the one restored", *found]

    def check_version(self) -> list[str]:
        """Resume from a checkpoint that says that it was written by a later version."""
        trial = self.bench.make(run=self.run)
        checkpoint = checkpoints(trial.run)[-1]
        _write_version(checkpoint, trial.name, UNKNOWN)
        try:
            trial.bus.resume(trial.run)
        except HookbusError as error:
            if str(UNKNOWN) in str(error):
                return []
            return [f"it is refused, and the version, {UNKNOWN}, is not named: {error}"]
        return [f"a section of version {UNKNOWN} was restored without a word"]

    def check_memory(self) -> list[str]:
        one, two = (self.bench.make(run=self.run) for _ in range(2))
        for trial in (one, two):
            trial.bus.resume(trial.run)
        seen = [
            f"{path} still holds the {what} of an event that is over"
            for path, what in one.trace().held.items()
        ]
        for start, end, name in one.list_memory():
            for first, last, _ in two.list_memory():
                if start < last and first < end:
                    seen.append(f"two runs restored from it share the memory of {name!r}")
                    break
        if not seen:
            kept = two.take_picture()
            with streams_kept():  # those of the process are shared, and rightly so
                self.bench.bring_on(one)
            checkpoint = checkpoints(one.run)[-1]
            checkpoint.verify()
            seen += list_differences(self.saved, one.read(checkpoint))
            seen += list_differences(kept, two.take_picture())
        return seen

    def restore_from_meta(self) -> list[str]:
        """Build it without data, give it memory where a script would shard it, and restore."""
        with torch.device("meta"):
            try:
                trial = self.bench.make(run=self.run)
            except Fault as fault:
                why = f"make() fails on the meta device: {fault.__cause__}"
                raise _NotChecked(why) from fault
        unmade = _list_unmade(trial)
        if not unmade:
            raise _NotChecked("it looks after no module that is built on the meta device")

        def allocate(resume: object) -> None:
            for module in unmade:
                module.to_empty(device="cpu")
                with torch.no_grad():  # what lies there may by chance be what was saved
                    for tensor in (*module.parameters(), *module.buffers()):
                        tensor.fill_(7)

        return self.restore(trial, configure_sharded=allocate)


def _list_unmade(trial: Trial) -> list[torch.nn.Module]:
    """Return the modules without data that a plugin looks after."""
    plugin = trial.entry.plugin
    found = [trial.bus.components.get(trial.name), *getattr(plugin, "__dict__", {}).values()]
    modules = [each for each in found if isinstance(each, torch.nn.Module)]
    return [
        module
        for module in modules
        if any(each.is_meta for each in (*module.parameters(), *module.buffers()))
    ]


def _write_version(checkpoint: Checkpoint, name: str, version: int) -> None:
    """Make the manifest say another version, as a later plugin would have."""
    _, manifest = read_manifest(checkpoint.path)
    section = manifest.sections[name]
    parts = {part: attrs.evolve(info, version=version) for part, info in section.parts.items()}
    sections = {**manifest.sections, name: attrs.evolve(section, parts=parts)}
    path = checkpoint.path / NAME
    path.unlink()
    write_file(path, [attrs.evolve(manifest, sections=sections).seal()])


def _cut(text: str) -> str:
    return text.partition(": ")[0]

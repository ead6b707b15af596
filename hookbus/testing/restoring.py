"""The laws of restoring."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from hookbus.checkpoint import Checkpoint, checkpoints
from hookbus.checkpoint.files import write_file
from hookbus.checkpoint.manifest import NAME, read_manifest
from hookbus.errors import HookbusError
from hookbus.testing.bench import Bench, streams_kept
from hookbus.testing.court import Court, NotChecked
from hookbus.testing.pictures import list_differences
from hookbus.testing.saving import Saved, list_drawn, list_held, list_own_changes
from hookbus.testing.source import Fault
from hookbus.testing.trial import Trial, copy_run

UNKNOWN = 10**6
"""A version that no plugin has reached."""


@attrs.frozen(eq=False)
class Restoring:
    """Has plugins take back what one has saved, on buses of their own."""

    court: Court
    bench: Bench
    may_change: tuple[str, ...]
    saved: Saved

    def check(self) -> None:
        """Try the laws; where nothing comes back at all, there is no more to tell."""
        fresh = self.bench.make(run=self.saved.run)
        first = "in place" if self.bench.is_single else "fresh"
        if self.bench.is_single:
            self.bench.bring_on(fresh)
            for key in ("fresh", "meta", "memory"):
                self.court.note(key, "not checked", "pass a function that makes it")
        self.court.try_law("check", self._check_checks, fresh)
        if not self.court.try_law(first, self._restore, fresh):
            self.court.give_up("it could not be restored")
            return
        self.court.try_law("twice", self._restore, fresh)
        self.court.try_law("goes on", self._check_going_on, fresh)
        if not self.bench.is_single:
            self.court.try_law("in place", self._restore_over_another)
            self.court.try_law("memory", self._check_memory)
            self.court.try_law("meta", self._restore_from_meta)
        self.court.try_law("version", self._check_version)

    def _restore(self, trial: Trial, **options: Any) -> list[str]:
        """Resume, and compare."""
        trial.bus.resume(trial.run, **options)
        return self._compare(trial)

    def _compare(self, trial: Trial) -> list[str]:
        found = list_differences(self.saved.state, trial.take_picture())
        return found and ["first is what was saved, second what it would save now", *found]

    def _need_change(self) -> None:
        if self.bench.change is None:
            raise NotChecked("pass change= instead of other=")

    def _restore_over_another(self) -> list[str]:
        self._need_change()
        trial = self.bench.make_changed()
        self.bench.bring_on(trial)
        copy_run(self.saved.run, trial.run)
        return self._restore(trial)

    def _check_checks(self, trial: Trial) -> list[str]:
        """Fire what only looks, and compare every attribute."""
        resume = trial.bus.prepare(trial.run)
        streams, before = self.bench.read_streams(), trial.look()
        resume.advance("resume_start")
        seen = before.list_changes(trial.look())  # a plugin may prepare itself there
        resume.advance("on_setup")
        start = trial.trace()
        trial.ask("check_state", resume=resume)
        trial.ask("restore_before_configure_sharded", resume=resume)
        seen += list_own_changes(start, trial.trace(), self.may_change)
        seen += list_drawn(streams, self.bench.read_streams())
        return list(dict.fromkeys(seen))

    def _check_going_on(self, trial: Trial) -> list[str]:
        self._need_change()
        trial.bus.resume(trial.run)
        self.bench.bring_on(trial)
        found = list_differences(self.saved.later, trial.take_picture())
        return found and ["first is the one that was saved, second the one restored", *found]

    def _check_version(self) -> list[str]:
        """Resume from a checkpoint that says that it was written by a later version."""
        trial = self.bench.make(run=self.saved.run)
        checkpoint = checkpoints(trial.run)[-1]
        _write_version(checkpoint, trial.name, UNKNOWN)
        try:
            trial.bus.resume(trial.run)
        except HookbusError as error:
            if str(UNKNOWN) in str(error):
                return []
            return [f"it is refused, and the version, {UNKNOWN}, is not named: {error}"]
        return [f"a section of version {UNKNOWN} was restored without a word"]

    def _check_memory(self) -> list[str]:
        one, two = (self.bench.make(run=self.saved.run) for _ in range(2))
        for trial in (one, two):
            trial.bus.resume(trial.run)
        seen = list_held(one.trace(), ("Save", "Resume", "Checkpoint"))
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
            seen += list_differences(self.saved.state, one.read(checkpoint))
            seen += list_differences(kept, two.take_picture())
        return seen

    def _restore_from_meta(self) -> list[str]:
        """Build it without data, give it memory where a script would shard it, and restore."""
        with torch.device("meta"):
            try:
                trial = self.bench.make(run=self.saved.run)
            except Fault as fault:
                why = f"make() fails on the meta device: {fault.__cause__}"
                raise NotChecked(why) from fault
        unmade = _list_unmade(trial)
        if not unmade:
            raise NotChecked("it looks after no module that is built on the meta device")

        def allocate(resume: object) -> None:
            for module in unmade:
                module.to_empty(device="cpu")
                with torch.no_grad():  # what lies there may by chance be what was saved
                    for tensor in (*module.parameters(), *module.buffers()):
                        tensor.fill_(7)

        return self._restore(trial, configure_sharded=allocate)


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

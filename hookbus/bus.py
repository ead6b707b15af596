"""The bus: it holds plugins and components, fires events, resumes and saves."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
import uuid
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Unpack

from hookbus.asked import Wanted, check_bool, check_word, warn_at_exit
from hookbus.background import wait_for_writers
from hookbus.checkpoint import Checkpoint, RunLock, make_run_directory, sweep
from hookbus.choosing import check_run, choose, choose_together
from hookbus.entry_points import Failed
from hookbus.errors import AttachError, BusError, CallError, SaveError, SequenceError
from hookbus.logs import say
from hookbus.many_ranks import find_ranks
from hookbus.ordering import Place, warn_of_unknown_words
from hookbus.plugins import Plugins
from hookbus.ranks import ALONE, Ranks
from hookbus.registration import EVENTS, Registered
from hookbus.relay import Relay
from hookbus.report import Report
from hookbus.request import Options, Request
from hookbus.resume import Resume
from hookbus.resuming import abandon, describe_run, describe_start
from hookbus.resuming import fire as fire_restore_event
from hookbus.run_writer import RunWriter
from hookbus.saver import Pace, Saver, check_right
from hookbus.sequence import RESUME_EVENTS
from hookbus.transfer import watched

made = weakref.WeakSet["HookBus"]()
"""Every bus of this process, so that tests can tell where a run stands."""


class HookBus:
    """Holds plugins, fires events, resumes and saves a run.

    Plugins installed under the entry-point group ``hookbus`` are loaded unless ``load_plugins``
    is false; those that could not be are in ``failed``, with one WARNING each. ``block`` names
    plugins or distributions to leave out, and so does ``HOOKBUS_DISABLE_PLUGINS`` (separated by
    commas): nothing of them is imported or called, and what they would have looked after is
    neither saved nor restored.

    As a context manager it closes itself; after an exception other than `SystemExit` nothing new
    is written.

    Raises:
        CallError: ``block`` is no tuple of names, or names what is not installed.
    """

    def __init__(self, *, load_plugins: bool = True, block: Collection[str] = ()) -> None:
        self._loop: Pace | None = None
        self._saver: Saver | None = None
        self._lock: RunLock | None = None
        self._closed = False
        self._ranks = self._ranks_behind = ALONE
        self._plugins = Plugins(self, load_plugins=load_plugins, block=block)
        made.add(self)

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError("a HookBus cannot be pickled or copied")

    def __enter__(self) -> HookBus:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None or issubclass(kind, SystemExit):
            self.close()
        else:
            self._ranks.leave_word("the script", sys.exception() or kind())
            self._let_go()

    # -- plugins and components ----------------------------------------------------------------

    @property
    def plugins(self) -> tuple[Registered, ...]:
        """Every plugin on the bus, in the order of registration."""
        return tuple(self._plugins.entries)

    @property
    def components(self) -> Mapping[str, object]:
        """The live object behind each attached name; a view that follows the bus."""
        return types.MappingProxyType(self._plugins.components)

    @property
    def failed(self) -> tuple[Failed, ...]:
        """The entry points that could not be loaded: name, distribution and exception of each."""
        return tuple(self._plugins.failed)

    @property
    def blocked(self) -> frozenset[str]:
        """The names of plugins and distributions that are left out."""
        return self._plugins.blocked

    @property
    def loop(self) -> Pace | None:
        """The loop that the bus keeps pace with, also where its plugin is blocked."""
        return self._loop

    @property
    def resumed(self) -> bool:
        """Whether there is a run to train and to save into."""
        return self._saver is not None

    @property
    def ranks(self) -> Ranks:
        """The processes of the run, as they were at the last resume."""
        return self._ranks

    @property
    def run(self) -> Path | None:
        """The run directory that is trained and saved into, if there is one."""
        return self._saver.writer.run if self._saver is not None else None

    @property
    def last(self) -> Checkpoint | None:
        """The newest committed checkpoint of the run, if it has one."""
        return self._saver.writer.last if self._saver is not None else None

    @property
    def saving(self) -> bool:
        """Whether a save is being written behind training."""
        return self._saver is not None and self._saver.writer.saving

    @property
    def hook(self) -> Relay:
        """The relay that fires events: ``bus.hook.restore_model(resume=resume)``."""
        return Relay(self.fire, self._plugins)

    def register(self, plugin: object, name: str | None = None) -> str:
        """Put a plugin on the bus and return its name, which is also its section's.

        The name defaults to the plugin's ``kind``, else to its class's name. The same object
        under the same name again is a no-op.

        Raises:
            RegistrationError: the plugin could not be called as it is written; it says why.
            NameTakenError: another plugin has that name.
        """
        if isinstance(plugin, Pace):
            self._check_loops([plugin])
        name = self._plugins.register(plugin, name)
        if isinstance(plugin, Pace):
            self._take_loop(plugin)
        return name

    def unregister(self, name: str) -> None:
        """Take a plugin, and its component, off the bus; ``bus_close`` fires for it alone."""
        self._plugins.unregister(name)
        if not any(component is self._loop for component in self.components.values()):
            self._loop = None
            if self._saver is not None:
                self._saver.pace = None

    def attach(self, **components: object) -> None:
        """Find a plugin for each component; the name is its section's.

        The same object under the same name again is a no-op. Nothing is attached unless all are.

        Raises:
            AttachError: nobody can look after a component; it says who was asked.
            NameTakenError: another component has that name.
        """
        loops = [each for each in components.values() if isinstance(each, Pace)]
        self._check_loops(loops)
        self._plugins.attach(components)
        for loop in loops:
            self._take_loop(loop)

    def order(self, event: str) -> list[Place]:
        """Return the plugins in the order in which ``event`` calls them, with the reasons."""
        return list(self._plugins.order(event))

    def fire(self, event: str, arguments: Mapping[str, object]) -> Any:
        """Fire an event whose arguments have been checked; scripts use ``bus.hook``."""
        if event not in RESUME_EVENTS:
            return self._plugins.call(event, arguments)
        resume = arguments["resume"]
        if not isinstance(resume, Resume):
            raise CallError(f"{event}: pass resume=, as bus.prepare(run) returned it")
        if resume is not self._plugins.resume:
            raise SequenceError(
                f"{event}: this resume is over, or another bus's; pass what this bus's last"
                " bus.prepare(run) returned"
            )
        result = fire_restore_event(
            event, resume, arguments, self._plugins, functools.partial(watched, self.fire)
        )
        if event == "resume_end":
            self._begin_run(resume)
        return result

    # -- resuming ------------------------------------------------------------------------------

    def resume(self, run: str | os.PathLike[str], **options: Unpack[Options]) -> Resume:
        """Fire all restore events in order: go on with ``run``, or start it fresh.

        ``run`` is the run directory, which need not exist. Options, all by name:

        - ``step``: this checkpoint instead of the newest one;
        - ``stage``: ``"fit"``, or ``"validate"``, ``"test"``, ``"predict"``: then training state
          and random streams are left alone, and the run directory is only read;
        - ``skip``: names or shell patterns of sections not to restore;
        - ``missing_ok``: of plugins that may start fresh where the checkpoint has no section;
        - ``aliases``: for each name that is new, the one that its section was saved under, such as
          ``{"encoder": "model"}``; needless, and no harm, once the run is saved under the new one;
        - ``only``: with another stage than ``"fit"``, the only sections to restore;
        - ``init_from``: a checkpoint, or a run (its newest), for a warm start with the sections
          ``init_only``, which default to ``("model",)``; ignored once this run has a checkpoint;
        - ``setup(resume)``, ``configure_sharded(resume)``: called in their events; what the
          latter returns takes the model's place;
        - ``verify``: ``"hashes"`` reads every byte before the first change, ``"sizes"`` does not;
        - ``fallback``: whether to go on from the newest good checkpoint where newer ones are
          damaged, which are renamed and stay; only with ``"fit"`` and without ``step``.

        Called again it rolls the run back to the newest checkpoint; where there is none,
        components keep the values that they have.

        Raises:
            CheckpointNotFoundError, CorruptCheckpointError, FormatError: on disk.
            RunLockedError: another process works in ``run``.
            ResumeError: sections and components do not fit; nothing was changed.
        """
        resume = self._prepare(run, options, by_script=False)
        resume.advance("resume_end")
        return resume

    @contextlib.contextmanager
    def resuming(self, run: str | os.PathLike[str], **options: Unpack[Options]) -> Iterator[Resume]:
        """Resume step by step, for scripts whose components come to life in between.

        ``resume_start`` fires on entry, ``resume_end`` on exit, and in between what the script
        asks for: ``resume.setup()``, ``resume.restore_model()``, ``resume.configure_sharded(fn)``
        and ``resume.restore_training_state()``. What it leaves out is fired in order before the
        next one. Options are those of `resume`.
        """
        resume = self._prepare(run, options, by_script=True)
        resume.advance("resume_start")
        try:
            yield resume
        except BaseException:
            abandon(resume, "the script")
            raise
        resume.advance("resume_end")

    def prepare(self, run: str | os.PathLike[str], **options: Unpack[Options]) -> Resume:
        """Choose the checkpoint and fire nothing: then fire ``bus.hook.resume_start`` and so on.

        Options are those of `resume`.
        """
        return self._prepare(run, options, by_script=True)

    # -- saving --------------------------------------------------------------------------------

    def save(
        self,
        *,
        step: int | None = None,
        wait: bool = True,
        metrics: Mapping[str, Any] | None = None,
        tag: str | None = None,
        why: str = "asked",
    ) -> Checkpoint | None:
        """Save the run; inside the loop, ask for it.

        In the loop's body or the epoch's own code the checkpoint is written at the next safe
        point, so it does not matter where the call stands, and ``None`` is returned. Elsewhere it
        is written before the call returns, unless nothing was counted since the last save or
        resume and no ``metrics`` and no ``tag`` are given. Without a loop ``step`` is required.

        With ``wait=False`` the state is copied, and it is written behind training: ``None`` is
        returned, and the next save waits for this one. The copy takes as much memory as the state
        and is used again. If it fails, the next save, the next safe point or ``close`` raises.

        ``metrics`` are numbers by name, kept with the checkpoint, and so are ``tag``, a word of
        the script's own, and ``why``.

        Raises:
            SaveError: not resumed yet, in a forked child, another thread, while an exception is
                being handled; or the save before failed behind training.
            UnattachedError: something that trains belongs to nothing on the bus.
            StateError: a state cannot be stored; nothing was written.
            WriteError: the disk refused; earlier checkpoints are as they were.
        """
        saver = self._get_saver()
        return saver.save(step, Wanted.make(metrics, wait, why, tag))

    def wait(self) -> None:
        """Wait for what is done behind training: the save is committed, deletions are over.

        Of several processes one may call it alone, so there what became of the save is taken in,
        or raised, where they meet next: by the next save, the next safe point or ``close``.

        Raises:
            SaveError: it failed; its cause is what went wrong first.
        """
        if self._saver is not None and self._ranks.world_size > 1:
            self._saver.writer.wait_out()
        elif self._saver is not None:
            self._saver.finish()

    def delete(self, *checkpoints: Checkpoint, why: str = "asked", wait: bool = True) -> None:
        """Delete checkpoints of this run, and say so in its history.

        Before that every byte of the newest one is read, once, and found right. With
        ``wait=False`` all of it is done behind training, and what is not deleted is a WARNING.

        Raises:
            SaveError: it is the newest, or none of this run.
            CheckpointNotFoundError: it, or the newest one, is not there.
            CorruptCheckpointError: it, or the newest one, is damaged and not deleted.
            WriteError: the disk refused.
        """
        saver = self._get_saver()
        for each in checkpoints:
            if not isinstance(each, Checkpoint):
                raise CallError(f"delete({each!r}): pass some of hookbus.checkpoints(run)")
        saver.delete(checkpoints, check_word("why", why), wait=check_bool("wait", wait))

    def reach_safe_point(self, loop: object) -> None:
        """Fire ``safe_point`` and write what was asked for; called by the loop on the bus."""
        failure = None
        try:
            self.collect_done()
        except SaveError as error:  # whoever has to save right now must still be asked
            failure = error
        self.hook.safe_point(loop=loop)
        if failure is not None:
            raise failure
        self.write_asked()

    def collect_done(self) -> None:
        """Take in the save behind training if it is done; all processes call it together.

        Raises:
            SaveError: it failed.
        """
        if self._saver is not None:
            self._saver.collect_done()

    def write_asked(self) -> None:
        """Write the save that was asked for, if any, as things stand; called by the loop."""
        if self._saver is not None:
            self._saver.write_asked()

    def close(self) -> None:
        """Write the save that was asked for, if any, wait, and let the run directory go.

        While an exception is being handled, as in a ``finally``, it is not written: the batch in
        hand may be half done.
        """
        try:
            if self._saver is not None and not self._closed:
                self._saver.write_last()
        finally:
            self._let_go()

    # -- inside --------------------------------------------------------------------------------

    def _check_loops(self, more: Iterable[Pace]) -> None:
        if len({id(each) for each in (self._loop, *more) if each is not None}) > 1:
            raise AttachError("there is a loop on this bus already, and a run has one")

    def _take_loop(self, loop: Pace) -> None:
        if all(entry.plugin is not loop for entry in self._plugins.entries):
            loop.bus_open(self)  # it is blocked, so it counts and is neither saved nor restored
        self._loop = loop
        if self._saver is not None:
            self._saver.pace = loop

    def _prepare(self, run: str | os.PathLike[str], options: Options, *, by_script: bool) -> Resume:
        if self._closed:
            raise BusError("this bus was closed; make a new one")
        ranks = find_ranks(self._ranks)
        if ranks is not self._ranks:
            self._ranks_behind.close()
            # All are here now, and at no later moment is that as sure.
            self._ranks, self._ranks_behind = ranks, ranks.make_others()
        with self._ranks.together("resume()"):
            return self._prepare_together(run, options, by_script=by_script)

    def _prepare_together(
        self, run: str | os.PathLike[str], options: Options, *, by_script: bool
    ) -> Resume:
        ranks = self._ranks
        request = Request.make(options)
        path = check_run(run)
        again = self._saver is not None and self._saver.writer.run == path
        if self._saver is not None:
            self._saver.finish()
        for each in EVENTS:
            self.order(each)  # a circle in the order of saving is said now, and not at a save
        if ranks.world_size > 1:
            ranks.agree("resume()", describe_run(path, request, self._plugins))
        with ranks.together("taking the run directory"):
            if request.stage == "fit":
                if not path.exists() and ranks.is_first:
                    choose(path, request)  # refuses before a folder is made
                self._take_lock(path)
        choice = choose_together(ranks, lambda: choose(path, request))
        checkpoint, fresh = choice.checkpoint, choice.fresh
        resume = Resume(
            run=path,
            request=request,
            checkpoint=checkpoint,
            fresh=fresh,
            components=self.components,
            report=Report(
                checkpoint=str(checkpoint.path) if checkpoint else None,
                step=checkpoint.step if checkpoint else None,
                stage=request.stage,
                fresh=fresh,
            ),
            entries=lambda: self._plugins.entries,
            fire=self._fire_by_name,
            may_grow=by_script or bool(request.setup or request.configure_sharded),
            by_script=by_script,
            blocked=self.blocked,
            failed=self.failed,
            ranks=ranks,
            damaged=choice.damaged,
            again=again,
        )
        self._saver = None
        self._plugins.resume = resume
        return resume

    def _take_lock(self, run: Path) -> None:
        if self._ranks.is_first:
            make_run_directory(run)
        wait_for_writers(run)  # an older bus of this process may have a save in flight
        lock = RunLock(run)
        if self._ranks.is_first:  # for all of them: it belongs to one process
            lock.take()
        if self._lock is not None:
            self._lock.release()  # if it was on this run, it has just been taken over
        self._lock, self._saver = lock, None
        if self._ranks.is_first:
            sweep(run)

    def _begin_run(self, resume: Resume) -> None:
        checkpoint = resume.checkpoint
        warn_of_unknown_words(self._plugins.entries)
        if resume.stage == "fit":
            assert self._lock is not None
            known = checkpoint is not None and not resume.fresh
            writer = RunWriter(
                run=resume.run,
                run_id=checkpoint.run_id
                if checkpoint and known
                else self._ranks.share("the id of the run", uuid.uuid4().hex),
                last=checkpoint if known else None,
                entries=lambda: self._plugins.entries,
                components=self.components,
                fire=self._fire_by_name,
                watch=functools.partial(watched, self.fire),
                check_right=functools.partial(check_right, self._lock),
                ranks=self._ranks,
                ranks_behind=self._ranks_behind,
            )
            writer.note_start(resume)
            self._saver = Saver(writer, self._lock, self._loop)
            warn_at_exit(self, self._saver.asked)
        if self._ranks.is_first:
            say(describe_start(resume))
        if checkpoint is not None:
            checkpoint.close()

    def _fire_by_name(self, event: str, **arguments: object) -> Any:
        return self.fire(event, arguments)

    def _get_saver(self) -> Saver:
        if self._closed:
            raise SaveError("this bus was closed; save before close()")
        if self._saver is None:
            last = self._plugins.resume
            raise SaveError(
                "there is no run to save into: call bus.resume(RUN) first, also for a fresh start"
                if last is None or last.stage == "fit"
                else f"the last resume was for stage {last.stage!r}, which only reads; call"
                " bus.resume(RUN) to train"
            )
        return self._saver

    def _let_go(self) -> None:
        try:
            if not self._closed:
                self._closed = True
                try:
                    if self._saver is not None:
                        self._saver.writer.wait_out()
                    self._ranks_behind.close()  # unless interrupted: then it is still in use
                finally:
                    self.fire("bus_close", {})
        finally:
            # What is left is free of cycles, so that loaders and their workers go when the script
            # lets go of them, and not when the garbage collector comes by.
            saver, self._saver, self._loop = self._saver, None, None
            self._plugins.clear()
            lock, self._lock = self._lock, None
            if lock is not None and saver is not None:
                saver.writer.when_done(lock.release)  # also if the waiting was interrupted
            elif lock is not None:
                lock.release()
            self._ranks.close()

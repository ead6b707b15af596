"""What the bus does around each restore event: verify, check, call, put in place, report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from hookbus.checkpoint import Checkpoint
from hookbus.errors import CallError, CorruptCheckpointError
from hookbus.fallback import Watch, find_good
from hookbus.logs import logger
from hookbus.plugins import Plugins
from hookbus.registration import EVENTS, Registered
from hookbus.relay import Answers
from hookbus.request import Request
from hookbus.resume import Resume
from hookbus.saver import LEFT_NOTE
from hookbus.sequence import RESTORE_EVENTS
from hookbus.settings import read_settings, read_versions


def fire(
    event: str, resume: Resume, arguments: Mapping[str, object], plugins: Plugins, watch: Watch
) -> Any:
    """Fire one restore event in its turn.

    Problems found before it are raised together, before the first change; if anything is raised,
    this resume is over.
    """
    with resume.ranks.together(event):
        return _fire(event, resume, arguments, plugins, watch)


def _fire(
    event: str, resume: Resume, arguments: Mapping[str, object], plugins: Plugins, watch: Watch
) -> Any:
    resume.sequence.begin(event)
    started = time.perf_counter()
    resume.event = event
    try:
        _get_ready(event, resume, plugins, watch)
        there = set(plugins.entries)
        result, answers = plugins.ask(event, arguments)
        _follow_up(event, resume, plugins, there, answers)
        resume.raise_problems(f"came up in {event}")
    except BaseException as error:
        if isinstance(error, CorruptCheckpointError) and event in RESTORE_EVENTS:
            error.add_note(
                "components may be changed by now; start again with verify='hashes', which looks"
                " before and goes on from the newest good checkpoint"
            )
        abandon(resume, event)
        raise
    finally:
        resume.event = None
        resume.report.time(event, time.perf_counter() - started)
    return result


def abandon(resume: Resume, where: str) -> None:
    """Let go of the checkpoint; no event of this resume can be fired any more."""
    resume.sequence.broken = resume.sequence.broken or where
    if resume.checkpoint is not None:
        resume.checkpoint.close()


def describe_run(run: Path, request: Request, plugins: Plugins) -> dict[str, object]:
    """Return what must be the same on all ranks of a run."""
    arguments = {
        name: value
        for name, value in attrs.asdict(request).items()
        if name not in ("setup", "configure_sharded")
    }
    return {
        "run directory": str(run),
        **{f"{name}=": value for name, value in arguments.items()},
        "plugins": [f"{entry} of kind {entry.kind!r}" for entry in plugins.entries],
        **{f"the order of {e}": [p.name for p in plugins.order(e)] for e in EVENTS},
        "versions": dict(read_versions()),
    }


def describe_start(resume: Resume) -> str:
    """Return the one line that says where the run goes on."""
    run = resume.run
    if run.is_relative_to(Path.cwd()):
        run = run.relative_to(Path.cwd())
    if resume.checkpoint is None:
        start = f"{run} holds no checkpoint yet: a fresh start"
        return start + (", with the values that components have by now" if resume.again else "")
    if resume.fresh:
        return f"{run} holds no checkpoint yet: a warm start from {resume.checkpoint.path}"
    if resume.stage != "fit":
        return f"{resume.stage} with step {resume.step} of {run}"
    progress = resume.checkpoint.progress
    where = [f"{word} {progress[word]}" for word in ("epoch", "batch") if word in progress]
    return f"{run} goes on after step {resume.step}" + "".join(f", {w}" for w in where)


def _get_ready(event: str, resume: Resume, plugins: Plugins, watch: Watch) -> None:
    if resume.checkpoint is None:
        return
    if event == "resume_start":
        find_good(resume, watch)
    elif event in RESTORE_EVENTS and event not in resume.sequence.skippable:
        final = "restore_training_state" if resume.stage == "fit" else "restore_model"
        last = event == final or resume.grown_up
        _check(resume, plugins, last=last)


def _follow_up(
    event: str, resume: Resume, plugins: Plugins, there: set[Registered], answers: Answers
) -> None:
    match event:
        case "resume_start" if resume.checkpoint is not None:
            resume.check_patterns()
            _check(resume, plugins, last=resume.grown_up)
            _note_changes(resume, resume.checkpoint)
        case "on_setup":
            _set_up(resume, plugins, there)
        case "configure_sharded":
            _put_in_place(resume, plugins, answers)
        case "resume_end":
            resume.complete_report()
            _tell_changes(resume)


def _check(resume: Resume, plugins: Plugins, *, last: bool) -> None:
    resume.collect_problems(last=last)
    plugins.call("check_state", {"resume": resume})
    resume.raise_problems("were found, and nothing was changed")


def _set_up(resume: Resume, plugins: Plugins, there: set[Registered]) -> None:
    """Set up what came to life in the event too, and ask on which side weights come back."""
    if resume.request.setup is not None:
        resume.request.setup(resume)
    while late := [p.entry for p in plugins.order("on_setup") if p.entry not in there]:
        for entry in late:
            there.add(entry)
            plugins.ask_one(entry, "on_setup", {"resume": resume, "stage": resume.stage})
    if resume.checkpoint is not None:
        _, answers = plugins.ask("restore_before_configure_sharded", {"resume": resume})
        resume.report.sharded_first = [entry.name for entry, answer in answers if answer is False]
        resume.sequence.behind = bool(resume.report.sharded_first)


def _put_in_place(resume: Resume, plugins: Plugins, heard: Answers) -> None:
    """Let what `configure_sharded` returned take the models' places."""
    answers = [(str(entry), what) for entry, what in heard]
    if resume.request.configure_sharded is not None:
        what = resume.request.configure_sharded(resume)
        if what is not None:
            answers.append(("the function configure_sharded=", what))
    if len(answers) > 1:
        who = " and ".join(who for who, _ in answers)
        raise CallError(f"{who} both answered configure_sharded; one of them shards the model")
    models = {entry.name: entry for entry in plugins.entries if entry.kind == "model"}
    for who, what in answers:
        if not isinstance(what, Mapping):
            if len(models) != 1:
                raise CallError(
                    f"{who} returned a {type(what).__qualname__} and there are {len(models)}"
                    " models; return a dict of name to object"
                )
            what = {next(iter(models)): what}
        unknown = [name for name in what if name not in models]
        if unknown:
            raise CallError(
                f"{who} returned {', '.join(map(repr, unknown))}, which is no attached model;"
                f" there are {', '.join(models) or 'none'}"
            )
        for name, component in what.items():
            plugins.components[name] = component
            models[name].plugin.component = component  # type: ignore[attr-defined]


def _note_changes(resume: Resume, checkpoint: Checkpoint) -> None:
    if LEFT_NOTE in checkpoint.notes:
        text = f"{checkpoint.path}: {LEFT_NOTE}; what stands after it in the body is not run again"
        resume.tell(text)
    if resume.stage != "fit" or resume.fresh:
        return
    ranks = resume.ranks
    if checkpoint.world_size != ranks.world_size:
        _note_world_size(resume, checkpoint.world_size, ranks.world_size)
    for saved, now, why in (
        (checkpoint.settings, read_settings(), "it decides how sums round"),
        (checkpoint.versions, read_versions(), "its kernels may round differently"),
    ):
        for name in {**saved, **now}:
            if saved.get(name) != now.get(name):
                resume.change(
                    name, saved.get(name), now.get(name), then="adapt", exact=False, why=why
                )


def _note_world_size(resume: Resume, saved: int, now: int) -> None:
    if saved > now:
        why = f"what rank {_list_ranks(range(now, saved))} had of its own is left behind"
    else:
        new = _list_ranks(range(saved, now))
        why = f"rank {new} is new and begins with what rank 0 had of its own"
    resume.change("world size", saved, now, then="adapt", exact=False, why=why)


def _list_ranks(ranks: range) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"


def _tell_changes(resume: Resume) -> None:
    tells = resume.ranks.is_first and resume.stage == "fit" and not resume.fresh
    if tells and resume.report.changes:
        changes = "\n  ".join(map(str, resume.report.changes))
        if any(change.then == "keep" for change in resume.report.changes):
            changes += "\n  (where the saved one is used, set the run's after bus.resume())"
        logger.warning(
            "%s goes on with other settings than it was saved with:\n  %s", resume.run, changes
        )

"""What came of putting a plugin through the laws."""

from __future__ import annotations

from typing import Literal

import attrs

Outcome = Literal["holds", "broken", "not checked", "left out"]


@attrs.frozen
class Law:
    """One thing that every plugin has to keep to; ``hint`` says what to change if it does not."""

    key: str
    text: str
    hint: str


LAWS = (
    Law(
        "order",
        "the order it declares exists",
        "name a kind or a plugin that is there in before= and after=; what it needs beside it,"
        " make(bus) can register",
    ),
    Law(
        "start",
        "a run starts without a checkpoint",
        "do not read where resume.checkpoint is None",
    ),
    Law(
        "something",
        "it saves something",
        "call save.write(state) in save_state with what has to come back",
    ),
    Law(
        "storable",
        "its state can be stored, and is read as it was",
        "hand over plain values, containers and tensors",
    ),
    Law(
        "repeatable",
        "saving twice gives the same",
        "leave out of the state what differs from call to call: times, counters of saves, ids, the"
        " order of a set",
    ),
    Law(
        "no draws",
        "saving draws no random number",
        "draw nothing in save_start and save_state, or draw from a generator that is made there",
    ),
    Law(
        "no changes",
        "saving changes nothing",
        "hand over what is there and change no attribute in save_start and save_state; name one"
        " that may change, such as a cache, in may_change=",
    ),
    Law(
        "differs",
        "another state is saved differently",
        "save what change= changes; if it is saved, let change= really change it",
    ),
    Law(
        "check",
        "a check changes nothing",
        "only compare resume.metadata() and call resume.problem() in resume_start, check_state and"
        " restore_before_configure_sharded; restore in a restore_ event",
    ),
    Law(
        "version",
        "an unknown version is refused",
        "let no step of @hookbus.migrate begin at a version that you never wrote",
    ),
    Law(
        "fresh",
        "restoring a fresh one brings back what was saved",
        "put everything that save_state writes back in restore_model or restore_training_state, by"
        " resume.read_into(live) or resume.read()",
    ),
    Law(
        "in place",
        "restoring over another state brings back what was saved",
        "set what is there instead of adding to it, and drop what the checkpoint does not have",
    ),
    Law(
        "meta",
        "restoring works where it was built on the meta device",
        "answer False in restore_before_configure_sharded while tensors are on meta, and copy into"
        " the tensors that are there in restore_model",
    ),
    Law(
        "goes on",
        "what was restored goes on like what was saved",
        "save what decides about the next change as well; if all of it is saved, let change= do"
        " the same each time",
    ),
    Law(
        "memory",
        "nothing is shared between checkpoint and run",
        "keep neither save, resume nor checkpoint, and no tensor in a class or module: every run"
        " has its own",
    ),
    Law(
        "twice",
        "restoring twice is the same as once",
        "set what is there instead of adding to it",
    ),
)


@attrs.frozen
class LawResult:
    """What came of one law: ``seen`` is what was found, or why it was not checked."""

    law: Law
    outcome: Outcome
    seen: tuple[str, ...] = ()


@attrs.frozen
class PluginReport:
    """What came of each law; ``str()`` is a table."""

    plugin: str
    results: tuple[LawResult, ...]

    @property
    def broken(self) -> tuple[LawResult, ...]:
        """The laws that the plugin breaks."""
        return tuple(each for each in self.results if each.outcome == "broken")

    def __str__(self) -> str:
        width = max(len(each.law.text) for each in self.results)
        keys = max(len(each.law.key) for each in self.results)
        lines = [self.plugin]
        for each in self.results:
            why = f": {each.seen[0]}" if each.seen and each.outcome != "broken" else ""
            lines.append(
                f"  {each.law.key:{keys}}  {each.law.text:{width}}  {each.outcome}{why}".rstrip()
            )
        return "\n".join(lines)

    def explain(self) -> str:
        """Say of each law that is broken what was seen, and what to change."""
        count = f"{len(self.broken)} of {len(self.results)} laws"
        blocks = [f"{self.plugin} breaks {count}"]
        for each in self.broken:
            seen = "\n            ".join(each.seen)
            blocks.append(
                f"  {each.law.text}\n    seen:   {seen}\n    change: {each.law.hint}"
                f" (law {each.law.key!r})"
            )
        return "\n".join(blocks)

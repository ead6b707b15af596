"""``hookbus plugins``: what is installed, in which order it is called, and what failed to load.

Plugins are code and import what they like, torch above all, so this command does what no other
does: it makes a bus.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hookbus.cli.output import AsJson, print_facts, print_json, print_table, show
from hookbus.errors import OrderError
from hookbus.logs import logger

if TYPE_CHECKING:
    from hookbus.bus import HookBus
    from hookbus.entry_points import Failed
    from hookbus.ordering import Place
    from hookbus.registration import Registered

_PLUGINS = {"plugin": False, "kind": False, "from": False, "events": False}
_ORDER = {"event": False, "place": True, "plugin": False, "why": False}
_FAILED = {"failed": False, "from": False, "why": False}


def plugins(
    events: Annotated[
        list[str] | None,
        typer.Argument(metavar="[EVENT...]", help="Show the order of these events alone."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Show the installed plugins, their order, and why.

    Plugins are imported for it. The exit status is 1 if one of them could not be loaded, or if
    their order goes round in a circle.
    """
    problems: list[str] = []
    with _load(problems) as bus:
        order = _collect_order(bus, events, problems)
        loaded, failed, blocked = bus.plugins, bus.failed, sorted(bus.blocked)
    if as_json:
        told = {
            "plugins": list(map(_describe_plugin, loaded)),
            "order": {event: list(map(_describe_place, order[event])) for event in order},
            "failed": list(map(_describe_failed, failed)),
            "blocked": blocked,
            "problems": problems,
        }
        print_json(told)
    else:
        print_table(_PLUGINS, map(_make_plugin_row, loaded))
        print()
        print_table(_ORDER, _make_order_rows(order))
        if failed:
            print()
            print_table(_FAILED, map(_make_failed_row, failed))
        if blocked or problems:
            print()
            print_facts(
                {
                    **({"blocked": ", ".join(blocked)} if blocked else {}),
                    **({"problem": "; ".join(problems)} if problems else {}),
                }
            )
    return int(bool(failed or problems))


@contextlib.contextmanager
def _load(problems: list[str]) -> Iterator[HookBus]:
    """Make a bus, as a script does, and close it; what plugins print is no part of the answer."""
    with contextlib.redirect_stdout(sys.stderr):
        from hookbus.bus import HookBus

        level = logger.level
        logger.setLevel(logging.ERROR)  # what failed is shown with the rest
        try:
            bus = HookBus()
        finally:
            logger.setLevel(level)
    yield bus
    with contextlib.redirect_stdout(sys.stderr):
        try:
            bus.close()
        except Exception as error:
            problems.extend(getattr(error, "__notes__", None) or [_describe_error(error)])


_Order = dict[str, list["Place"]]


def _collect_order(bus: HookBus, asked: Collection[str] | None, problems: list[str]) -> _Order:
    """Return who is called in which event, as the plugins alone would have it."""
    from hookbus.registration import EVENTS

    order = {}
    for event in asked or EVENTS:
        try:
            places = bus.order(event)
        except OrderError as error:
            problems.append(str(error))
        else:
            if places or asked:
                order[event] = places
    return order


def _describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


# -- tables --------------------------------------------------------------------------------------


def _make_plugin_row(plugin: Registered) -> list[str]:
    origin = _join_origin(plugin.distribution, plugin.version)
    return [plugin.name, show(plugin.kind), origin, ", ".join(plugin.events)]


def _make_order_rows(order: _Order) -> Iterator[list[str]]:
    for event, places in order.items():
        for number, place in enumerate(places, 1):
            yield [event, str(number), place.name, place.reason]
        if not places:
            yield [event, "-", "-", "no installed plugin implements it"]


def _make_failed_row(failed: Failed) -> list[str]:
    origin = _join_origin(failed.distribution, failed.version)
    return [failed.name, origin, _describe_error(failed.exception)]


def _join_origin(distribution: str | None, version: str | None) -> str:
    return " ".join(filter(None, [distribution, version])) or "-"


# -- JSON ----------------------------------------------------------------------------------------


def _describe_plugin(plugin: Registered) -> dict[str, Any]:
    names = ("name", "kind", "distribution", "version", "origin", "events", "before", "after")
    return {name: getattr(plugin, name) for name in names}


def _describe_place(place: Place) -> dict[str, str]:
    return {"name": place.name, "reason": place.reason}


def _describe_failed(failed: Failed) -> dict[str, Any]:
    return {
        "name": failed.name,
        "distribution": failed.distribution,
        "version": failed.version,
        "error": _describe_error(failed.exception),
        "traceback": "".join(traceback.format_exception(failed.exception)),
    }

"""For your own tests: the laws of a plugin, an exact resume, and faults of process and disk.

Nothing here needs a test framework, and torch is imported by the first use of what needs it.
`check_plugin` puts a plugin through the laws that every plugin has to keep to;
`assert_exact_resume` trains, cuts, resumes and compares bit for bit.

The faults work wherever this process changes a run directory, also behind training. Every crash
point of a save, say, is this loop::

    import torch
    import hookbus
    from hookbus.testing import crash_at, faulty_storage, record

    def save(run, step):
        state = {"weights": torch.full((3,), float(step))}
        with hookbus.HookBus() as bus:
            bus.attach(state=state)
            bus.resume(run)
            bus.save(step=step, wait=False)

    save(run, 1)
    with record() as changes:
        save(run, 2)
    for number in range(1, len(changes) + 1):
        with crash_at(number) as crash:
            save(run, 2 + number)
        assert crash.happened
        assert hookbus.checkpoints(run)[-1].step >= 2

A disk that is full, or slow::

    with faulty_storage(error=OSError(errno.ENOSPC, "full"), on="write", path="*.safetensors"):
        ...  # raises what your script makes of it
    with faulty_storage(error=None, gate=event):
        ...  # nothing is changed before event.set()
"""

import importlib
import typing

from hookbus.testing.faults import Crash, DiskChange, Storage, crash_at, faulty_storage, record

if typing.TYPE_CHECKING:
    from hookbus.testing.comparing import CutRun, ExactReport
    from hookbus.testing.exact import assert_exact_resume
    from hookbus.testing.laws import check_plugin
    from hookbus.testing.recorder import Recorder, open_record
    from hookbus.testing.runs import Cut
    from hookbus.testing.verdict import Law, LawResult, PluginReport
else:
    _LATER = {
        "Cut": "hookbus.testing.runs",
        "CutRun": "hookbus.testing.comparing",
        "ExactReport": "hookbus.testing.comparing",
        "Law": "hookbus.testing.verdict",
        "LawResult": "hookbus.testing.verdict",
        "PluginReport": "hookbus.testing.verdict",
        "Recorder": "hookbus.testing.recorder",
        "assert_exact_resume": "hookbus.testing.exact",
        "check_plugin": "hookbus.testing.laws",
        "open_record": "hookbus.testing.recorder",
    }

    def __getattr__(name):
        if name in _LATER:
            globals()[name] = found = getattr(importlib.import_module(_LATER[name]), name)
            return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *_LATER})


__all__ = [
    "Crash",
    "Cut",
    "CutRun",
    "DiskChange",
    "ExactReport",
    "Law",
    "LawResult",
    "PluginReport",
    "Recorder",
    "Storage",
    "assert_exact_resume",
    "check_plugin",
    "crash_at",
    "faulty_storage",
    "open_record",
    "record",
]

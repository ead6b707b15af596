"""The report says what one resume did, as a table and as plain data."""

from __future__ import annotations

import json

import pytest

from hookbus.report import Report


def make_report() -> Report:
    report = Report("runs/demo/step-00000300", 300, "fit", fresh=False)
    report.add("model", "model", "Model", "hookbus", "missing")
    report.add("ema", "ema", "EmaPlugin", None, "skipped")
    report.set_status("model", "restored", event="restore_model", seconds=0.25, bytes=1_500_000)
    report.time("restore_model", 0.3)
    report.time("resume_end", 0.1)
    report.sharded_first.append("fsdp")
    report.note("lr 0.1 as in the checkpoint, not 0.2", "optimizer")
    report.note("threads 2 → 1")
    return report


def test_a_report_is_a_table_of_plain_text() -> None:
    assert str(make_report()).splitlines() == [
        "resumed from runs/demo/step-00000300, step 300, stage fit",
        "section  kind   status    event          seconds  bytes   plugin",
        "model    model  restored  restore_model  0.250    1.5 MB  Model (hookbus)",
        "ema      ema    skipped                                   EmaPlugin",
        "0.400 seconds: restore_model 0.300, resume_end 0.100",
        "restore_model came after configure_sharded, as asked by fsdp",
        "note: optimizer: lr 0.1 as in the checkpoint, not 0.2",
        "note: threads 2 → 1",
    ]


def test_a_fresh_start_and_a_warm_start_say_what_they_are() -> None:
    assert str(Report(stage="test")) == "fresh start, stage test"
    warm = str(Report("old/step-00000007", 7, fresh=True))
    assert warm == "warm start from old/step-00000007, step 7, stage fit"


def test_a_report_survives_json_without_loss() -> None:
    data = make_report().to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["sections"]["model"] == {
        "name": "model",
        "kind": "model",
        "plugin": "Model",
        "distribution": "hookbus",
        "status": "restored",
        "event": "restore_model",
        "seconds": 0.25,
        "bytes": 1_500_000,
    }


def test_the_same_note_is_kept_once_however_often_a_check_is_asked() -> None:
    report = Report()
    for _ in range(3):
        report.note("kept", "model")
    report.note("kept")
    assert report.notes == ["model: kept", "kept"]


def test_seconds_and_bytes_of_one_section_add_up_and_its_event_stays() -> None:
    report = Report()
    report.add("model", "model", "Model", None, "restored")
    report.set_status("model", "restored", event="restore_model", seconds=1.0, bytes=10)
    report.set_status("model", "restored", seconds=0.5, bytes=5)
    section = report.sections["model"]
    assert (section.event, section.seconds, section.bytes) == ("restore_model", 1.5, 15)


def test_a_section_that_was_never_added_has_no_status() -> None:
    with pytest.raises(KeyError, match="model"):
        Report().set_status("model", "restored")

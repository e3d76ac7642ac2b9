"""Commands that name a config's file: it may be any file, may never answer, and what it has is not shown."""

import json
import logging
import os
import threading
import time

import pytest

import kvtiers
from kvtiers.control import CommandRefused, ControlSocket, send_command
from kvtiers.control_actions import EngineActions
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity

LAYOUT = CacheLayout(ModelIdentity("some-org/model", weights="w"), (KVGroup("all", 16),), (KVTensor("t", 0, 2000),))
CONFIG = "version: 1\nprimary: {capacity: 1MiB, prefault: false}\n"
CANARY = "canary-5d0e7"


@pytest.fixture
def control(tmp_path):
    """The control socket of an engine that steps; its config is the file ``tiers.yaml``."""
    (tmp_path / "tiers.yaml").write_text(CONFIG)
    manager = kvtiers.open_manager(tmp_path / "tiers.yaml", LAYOUT)
    control, over = ControlSocket(EngineActions(manager, "some-org/model").actions()), threading.Event()

    def steps():
        while not over.wait(0.001):
            manager.on_schedule_end()

    engine = threading.Thread(target=steps)
    engine.start()
    yield control
    over.set()
    engine.join(60)
    control.close()
    manager.shutdown()


def wait_for(caplog, text):
    """Wait until this is in the log: an engine's lines are handed on by a thread of their own."""
    until = time.monotonic() + 60
    while text not in caplog.text:
        assert time.monotonic() < until, f"{text!r} is not logged"
        time.sleep(0.01)


@pytest.mark.parametrize(
    "text",
    [
        f"root:*:{CANARY}:0:99999:7::\n",
        f"root:*:{CANARY}:\n",
        f"{CANARY} and more words:\n",
        f"{CANARY}\n",
        f"- {CANARY}\n",
        f"? '{CANARY} x'\n: 1\n? '{CANARY} x'\n: 2\n",
        f"a: !!int {CANARY}\n",
        f"a: *{CANARY}+\n",
        f"a: !{CANARY}! b\n",
        f"version: 1\nprimary: {{capacity: 1MiB}}\nsecondary: [{{type: '{CANARY} x'}}]\n",
        f"version: 1\nprimary: {{capacity: 1MiB, eviction: '{CANARY} x'}}\n",
    ],
)
def test_the_text_of_a_file_that_is_no_config_is_in_no_answer_log_or_status(control, tmp_path, caplog, text):
    file = tmp_path / "other"
    file.write_text(text)
    for action, more in (("reload", {}), ("attach", {"tier": "fs"})):
        with caplog.at_level(logging.INFO), pytest.raises(CommandRefused) as caught:
            send_command(control.name, action, 30, config=str(file), **more)
        assert str(file) in str(caught.value)
        assert CANARY not in str(caught.value)
        wait_for(caplog, f": {action} config=")
    assert str(file) in caplog.text
    assert CANARY not in caplog.text
    assert CANARY not in json.dumps(list(control.latest))


def test_what_is_logged_of_a_refused_file_is_which_one_and_not_what_it_has(control, tmp_path, caplog):
    (tmp_path / "other").write_text("hunter2: 1\nversion: 1\n")
    with caplog.at_level(logging.INFO), pytest.raises(CommandRefused, match="unknown option 'hunter2'"):
        send_command(control.name, "reload", 30, config=str(tmp_path / "other"))
    wait_for(caplog, "is no config that can be used: 2 problems; nothing was changed")
    assert "hunter2" not in caplog.text
    assert "hunter2" not in json.dumps(list(control.latest))


def test_a_file_that_never_answers_or_never_ends_is_refused_and_the_next_command_is_done(control, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").write_bytes(b"a" * (2 << 20))
    for path, why in (
        (tmp_path / "fifo", "is a pipe, a socket or a device; expected a regular file"),
        ("/dev/zero", "is a pipe, a socket or a device; expected a regular file"),
        (tmp_path / "large", "is larger than 1 MiB"),
    ):
        with pytest.raises(CommandRefused, match=why):
            send_command(control.name, "reload", 30, config=str(path))
    assert send_command(control.name, "reload", 30)[0] == "nothing to apply"


def test_while_a_file_is_read_from_a_file_system_that_hangs_other_commands_are_done(control, tmp_path, monkeypatch):
    reads, goes_on = threading.Event(), threading.Event()

    def hang(source):
        reads.set()
        goes_on.wait(60)
        return load(source)

    load = kvtiers.live_config.load_config
    monkeypatch.setattr("kvtiers.live_config.load_config", hang)
    answers = []
    reload = threading.Thread(target=lambda: answers.append(send_command(control.name, "reload", 60)))
    reload.start()
    try:
        assert reads.wait(60)
        with pytest.raises(CommandRefused, match="there is no tier 'fs'"):  # asked, and not "try again"
            send_command(control.name, "limit", 30, tier="fs", threads=3)
        with pytest.raises(CommandRefused, match="another command still reads a config's file; try again"):
            send_command(control.name, "attach", 30, tier="fs")
    finally:
        goes_on.set()
        reload.join(60)
    assert answers[0][0] == "nothing to apply"

"""A Ctrl-C that somebody swallows is not lost."""

import os
import signal
import threading
from contextlib import suppress

import pytest

from localchat.interrupts import none_lost


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_swallowed_ctrl_c_is_raised_at_the_end() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), none_lost():
        with suppress(KeyboardInterrupt):
            press()
        done.append("the rest")
    assert done == ["the rest"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_that_arrives_is_raised_at_once() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), none_lost():
        press()
        done.append("never")
    assert done == []
    with none_lost():
        done.append("nothing pressed")
    assert done == ["nothing pressed"]


def test_one_that_has_to_wait() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), none_lost(at_once=False):
        press()
        done.append("all")
    assert done == ["all"]


def test_where_it_is_ignored_and_in_threads_nothing_changes() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with none_lost():
            press()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    faults = []

    def run() -> None:
        try:
            with none_lost():
                pass
        except ValueError as error:
            faults.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert faults == []

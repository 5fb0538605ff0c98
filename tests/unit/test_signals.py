"""Signals of a process reach its event loop once each."""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path

import pytest
from support.waiting import PATIENCE_S

import iris
import relay
from iris.signals import on_signal


def test_no_module_takes_signals_from_the_loop() -> None:
    """uvloop counts a signal twice if it comes with another one: see `iris.signals`."""
    modules = [
        path for package in (iris, relay) for path in Path(package.__file__).parent.rglob("*.py")
    ]
    users = [path.name for path in modules if ".add_signal_handler(" in path.read_text()]
    assert len(modules) > 100
    assert users == []


def test_once_the_loop_is_closed_an_interrupt_is_what_it_is_elsewhere() -> None:
    before = signal.getsignal(signal.SIGINT)

    async def take() -> None:
        on_signal(signal.SIGINT, lambda: None)

    try:
        asyncio.run(take())
        with pytest.raises(KeyboardInterrupt):
            _be_interrupted()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def _be_interrupted() -> None:
    lock = threading.Lock()
    with lock:
        threading.Thread(target=_interrupt).start()
        lock.acquire(timeout=PATIENCE_S)


def _interrupt() -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)

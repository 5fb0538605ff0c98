"""A stream without an event loop: one thread appends orders, two threads of a worker pool handle each of them once."""

import os
import subprocess
import sys
import tempfile
import threading

import iris.blocking
from iris.streams.blocking import Consumer

LAST = 20


def work(worker: Consumer, done: list[int], all_done: threading.Event) -> None:
    for message in worker:
        done.append(message.decode(int))
        worker.ack(message)
        if len(done) == LAST:
            all_done.set()


def main() -> None:
    with iris.blocking.connect() as client:
        client.streams.create("orders")
        print("stored at", client.streams.append("orders", 0))
        client.streams.append_many("orders", list(range(1, LAST)))

        done: list[int] = []
        all_done = threading.Event()
        workers = [client.streams.consumer("orders", "invoices", shared=True) for _ in range(2)]
        for worker in workers:
            threading.Thread(target=work, args=(worker, done, all_done)).start()
        all_done.wait()
        print("handled", len(done), "orders, each once:", sorted(done) == list(range(LAST)))
        for worker in workers:
            worker.close()  # ends the loop of its thread

        with client.streams.read("orders", start=15, follow=False) as orders:
            print("read again:", [order.value for order in orders])


with tempfile.TemporaryDirectory() as directory:
    os.environ["XDG_RUNTIME_DIR"] = (
        directory  # the relay puts its socket and its temporary keys there
    )
    command = [sys.executable, "-P", "-m", "relay", "--dev", "--data", f"{directory}/data"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as relay:
        while relay.stderr and b"relay.started" not in relay.stderr.readline():
            pass
        main()
        relay.terminate()

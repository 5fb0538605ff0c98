"""ZeroMQ: REQ and REP, PUSH and PULL, PUB and SUB, each pair at an address of its own."""

import asyncio

import zmq
import zmq.asyncio


async def greet(sockets: zmq.asyncio.Context, port: list[int]) -> None:
    rep = sockets.socket(zmq.REP)
    port.append(rep.bind_to_random_port("tcp://127.0.0.1"))
    await rep.send(b"hello, " + await rep.recv())
    rep.close()


async def main() -> None:
    with zmq.asyncio.Context() as sockets:
        port: list[int] = []
        server = asyncio.create_task(greet(sockets, port))
        await asyncio.sleep(0)  # it has bound its socket
        with sockets.socket(zmq.REQ) as req:
            req.connect(f"tcp://127.0.0.1:{port[0]}")
            await req.send(b"world")
            print((await asyncio.wait_for(req.recv(), 5.0)).decode())
        await server

        with sockets.socket(zmq.PULL) as pull, sockets.socket(zmq.PUSH) as push:
            push.connect(f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}")
            await push.send(b"a job")
            print("done:", (await pull.recv()).decode())

        with sockets.socket(zmq.XPUB) as pub, sockets.socket(zmq.SUB) as sub:
            sub.connect(f"tcp://127.0.0.1:{pub.bind_to_random_port('tcp://127.0.0.1')}")
            sub.subscribe(b"orders.")
            await pub.recv()  # the subscription has arrived
            await pub.send_multipart([b"orders.new", b"1 espresso"])
            topic, payload = await sub.recv_multipart()
            print(topic.decode(), payload.decode())


asyncio.run(main())

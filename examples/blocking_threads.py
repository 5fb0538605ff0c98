"""The same calls without an event loop: for scripts, thread pools, notebooks."""

from concurrent.futures import ThreadPoolExecutor

import iris
import iris.blocking

service = iris.Service("squares")


@service.on_request
def square(number: int) -> int:
    return number * number


with iris.blocking.connect(embedded=True) as client, client.serve(service):

    def ask(number: int) -> int:
        answer: int = client.request("squares", number, timeout=5.0, type=int)
        return answer

    with ThreadPoolExecutor(8) as threads:  # one client serves any number of threads
        print(sum(threads.map(ask, range(100))))

    with client.subscribe("news.>") as messages:
        client.publish("news.today", "threads can listen, too")
        print(next(messages).payload.decode())

"""The program that the compose file and the example for Kubernetes run: `iris run greetings`."""

import iris

service = iris.Service("greeter")


@service.on_request
def greet(name: str) -> str:
    return f"hello, {name}"
